"""Train, kill, resume, compare, evaluate, release, mirror: what Holdfast promises, at work.

    python examples/digits/main.py [FOLDER]

Leaves a registry in FOLDER/registry (`holdfast-demo` by default) to look around in. Run it as often
as you like: every time adds two runs. Ends with exit code 1 when a claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import holdfast
from holdfast import Checkpoint, Registry

HERE = Path(__file__).parent
STEPS = 480
EVERY = 40
PATIENCE_S = 300
BUCKET = "holdfast-demo"


class Story:
    """The output of the example, and whether every claim was true."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.broken: list[str] = []

    def chapter(self, title: str) -> None:
        """Begin a part."""
        print(f"\n[{time.monotonic() - self.began:5.1f} s] {title}", flush=True)

    def say(self, text: str) -> None:
        """Print what happened."""
        print(f"          {text}", flush=True)

    def claim(self, text: str, holds: bool) -> None:
        """Print a claim, and note whether it is true."""
        print(f"  {'ok  ' if holds else 'FAIL'}    {text}", flush=True)
        if not holds:
            self.broken.append(text)


class Program:
    """One of the example's programs, run as a process of its own."""

    def __init__(self, log: Path, *command: str) -> None:
        self.log = log
        with log.open("a") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(HERE / command[0]), *command[1:]],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> int:
        """End it without a warning; return its exit status."""
        self._process.kill()
        return self._process.wait()

    def wait(self) -> None:
        """Return when it has ended well.

        Raises:
            SystemExit: It has not.
        """
        try:
            status = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            sys.exit(f"a program took more than {PATIENCE_S} s: is the machine busy? Start again")
        if status != 0:
            sys.exit(f"{self.log}:\n{self.log.read_text()}")

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None


def main() -> int:
    """Run the example; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("holdfast-demo"))
    folder = parser.parse_args().folder
    story = Story()
    with ExitStack() as stack:
        reg = stack.enter_context(make_registry(story, folder))
        killed, straight = train_twice(story, reg, folder)
        compare(story, reg, folder, killed, straight)
        here = evaluate(story, reg.url, f"{killed}/best")
        look_back(story, reg, folder, killed)
        release(story, reg, folder, killed)
        endpoint = stack.enter_context(s3_server())
        far = mirror(story, reg, endpoint)
        there = evaluate(story, far, f"{straight}/best")
        story.claim("the same id has the same score", there["score"] == here["score"])
        bring_home(story, reg, far, straight)
        story.chapter("Every byte of both registries is read and checked against its digest")
        for url in (reg.url, far):
            verify(story, url)
        tell_story(story, reg.url, killed)
        page = write_page(story, reg.url, folder, [killed, straight, f"{killed}-branch"])
    story.chapter("Done")
    if story.broken:
        story.say(f"{len(story.broken)} claims did not hold: {'; '.join(story.broken)}")
        return 1
    story.say("every claim held; look around:")
    holdfast = shown(Path(sys.executable).with_name("holdfast"))
    story.say(f"  export HOLDFAST_REGISTRY={shown(folder / 'registry')}")
    for command in ("run ls", f"ls {killed}", f"log {killed}", f"diff {killed} {killed}/best"):
        story.say(f"  {holdfast} {command}")
    if page is not None:
        story.say(f"  {holdfast} ui")
        story.say(f"the page of these runs: {page.resolve().as_uri()}")
    return 0


def make_registry(story: Story, folder: Path) -> Registry:
    """Make the registry, or open the one of the last time."""
    story.chapter("A registry is a folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    place = folder / "registry"
    there = (place / "registry.json").exists()
    reg = holdfast.open(place) if there else holdfast.init(place)
    story.say(
        f"{place}: {'opened' if there else 'made'}, {len(reg.run_names())} runs, id {reg.id[:12]}"
    )
    return reg


def train_twice(story: Story, reg: Registry, folder: Path) -> tuple[str, str]:
    """Train one run that is killed and resumed, and the same without a kill beside it."""
    taken = {name.partition("-")[0] for name in reg.run_names()}
    name = next(name for name in map("demo{}".format, count(1)) if name not in taken)
    killed, straight = f"{name}-killed", f"{name}-straight"
    story.chapter(f"Two runs train side by side; {killed} will not live long")

    def start(run_id: str) -> Program:
        log = folder / f"{run_id}.log"
        arguments = ("--registry", reg.url, "--run", run_id, "--steps", str(STEPS))
        return Program(log, "train.py", *arguments)

    undisturbed, victim = start(straight), start(killed)
    wait_for_checkpoints(reg, killed, victim)
    status = victim.kill()
    run = reg.run(killed)
    for ck in run.checkpoints():
        story.say(f"{killed}: {describe(ck)}")
    saved = run.manifest.count
    story.claim(f"SIGKILL at a random instant ended {killed}", status == -signal.SIGKILL)
    story.claim(f"{saved} checkpoints were saved, of {STEPS // EVERY}", saved >= 2)
    story.chapter("The same command again")
    again = start(killed)
    again.wait()
    for line in again.log.read_text().splitlines():
        if "resumed" in line or "passed over" in line:
            story.say(line)
    story.claim(f"{killed} came to its end", reg.run(killed).status == "completed")
    undisturbed.wait()
    story.claim(f"{straight} came to its end", reg.run(straight).status == "completed")
    return killed, straight


def wait_for_checkpoints(reg: Registry, run_id: str, trainer: Program) -> None:
    """Return at some instant after the second checkpoint and, as a rule, long before the last."""
    wanted = random.randint(2, STEPS // EVERY // 2)
    deadline = time.monotonic() + PATIENCE_S
    run = None
    saved: list[float] = []
    while len(saved) < wanted:
        if not trainer.running or time.monotonic() > deadline:
            sys.exit(f"{trainer.log}: no {wanted} checkpoints:\n{trainer.log.read_text()}")
        time.sleep(0.01)
        if run is None and run_id in reg.run_names():
            run = reg.run(run_id)
        if run is not None:
            found = run.refresh().manifest.count
            saved += [time.monotonic()] * (found - len(saved))
    # Anywhere in the time that the next checkpoint takes, the save of it included.
    time.sleep(random.random() * (saved[-1] - saved[0]) / (wanted - 1))


def compare(story: Story, reg: Registry, folder: Path, killed: str, straight: str) -> None:
    """Show that a kill and a resume left no trace in what was trained."""
    story.chapter("Does the kill show in the result?")
    ours, theirs = (reg.checkpoint(f"{name}/latest") for name in (killed, straight))
    for ck in (ours, theirs):
        story.say(f"{ck.run_id}: {describe(ck)}")
    story.claim(
        f"step {STEPS} has the same id in both runs: the same bits in weights, optimizer, "
        "scheduler and generators",
        ours.step == theirs.step == STEPS and ours.digest == theirs.digest,
    )
    # The log has every checkpoint, evicted ones included.
    histories = [
        [(one.step, one.manifest) for one in reg.run(name).history.manifest().checkpoints]
        for name in (killed, straight)
    ]
    expected = STEPS // EVERY
    story.claim(
        f"so have all {expected} steps",
        histories[0] == histories[1] and len(histories[0]) == expected,
    )
    every = [one for run in reg.run_names() for one in reg.run(run).history.manifest().checkpoints]
    total = sum(one.size_bytes for one in every)
    kept = bytes_in(folder)
    story.claim(
        f"equal chunks are stored once: {size(total)} of checkpoints take {size(kept)}",
        kept < 0.6 * total,
    )


def evaluate(story: Story, url: str, ref: str) -> dict[str, Any]:
    """Let another process score a checkpoint and report what it found."""
    story.chapter(f"Another process pulls {ref} from {url}")
    done = subprocess.run(
        [sys.executable, str(HERE / "evaluate.py"), "--registry", url, ref],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    if done.returncode != 0:
        sys.exit(f"the evaluator ended with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    accuracy = found["score"]["test_accuracy"]
    story.say(f"step {found['step']}, {found['id'][:19]}, test accuracy {accuracy:.4f}")
    with holdfast.open(url, read_only=True) as reg:
        ck = reg.checkpoint(ref)
        run = reg.run(ck.run_id)
        phase = [one for one in run.history.manifest().checkpoints if one.phase == ck.phase]
        lowest = min(one.metrics["validation_loss"] for one in phase)
        story.claim(
            f"best has the lowest validation loss of phase {ck.phase}",
            ck.metrics["validation_loss"] == lowest,
        )
        reported = ck.metrics.get("test_accuracy")
        story.claim("the evaluator's report is in the registry", reported == accuracy)
    return found


def look_back(story: Story, reg: Registry, folder: Path, run_id: str) -> None:
    """Show what is left of a run by its preset: phases, gate, retention, stream."""
    story.chapter(f"What the preset made of {run_id}")
    run = reg.run(run_id)
    for phase in run.manifest.spec.phases:
        kept = run.checkpoints(phase=phase.name)
        best, latest = run.best(phase=phase.name), run.latest(phase=phase.name)
        shown = ", ".join(str(ck.step) for ck in kept)
        story.say(f"phase {phase.name}: {phase.about} Kept: steps {shown}")
        story.claim(
            f"phase {phase.name} keeps its last 3 and its best, at most 4",
            len(kept) <= 4 and best in kept and latest in kept,
        )
    gate, best = run.pins.gates.get("plain_best"), run.best(phase="plain")
    story.claim("the gate is the best of the first phase", best is not None and gate == best)
    losses = run.streams["loss"].read()
    story.claim(
        f"the stream holds the loss of each of the {STEPS} steps once, killed or not",
        [entry["step"] for entry in losses] == list(range(1, STEPS + 1)),
    )
    before = bytes_in(folder)
    branch = reg.fork(gate, f"{run_id}-branch")
    cost = bytes_in(folder) - before
    story.claim(
        f"a fork from the gate, {size(gate.size_bytes)} of state, costs {size(cost)}",
        cost < 64 * 1024 and reg.checkpoint(f"{branch.id}/latest").digest == gate.digest,
    )


def release(story: Story, reg: Registry, folder: Path, run_id: str) -> None:
    """Publish the best network, without what only training needs."""
    story.chapter("The best network becomes release 1.0.0")
    run, best = reg.run(run_id), reg.checkpoint(f"{run_id}/best")
    card = {
        "description": "Classifies handwritten digits, 8 by 8 pixels.",
        "data": "the digits of scikit-learn, shifted by up to a pixel",
        "intended_use": "this demonstration",
    }
    before = bytes_in(folder)
    published = run.releases.publish("1.0.0", best, card=card)
    cost = bytes_in(folder) - before
    story.say(f"{published.ref}: {', '.join(published.components)}; {published.digest.short}")
    story.claim(
        f"it holds the model alone and costs {size(cost)}",
        list(published.components) == ["model"] and cost < 64 * 1024,
    )
    found = reg.stored(f"{run_id}/releases/latest")
    story.claim("releases/latest is it", found.digest == published.digest)


def tell_story(story: Story, url: str, run_id: str) -> None:
    """Print the run's history as anybody can read it."""
    story.chapter(f"The story of {run_id}, newest first")
    holdfast = Path(sys.executable).with_name("holdfast")
    done = subprocess.run(
        [str(holdfast), "log", run_id, "-r", url], stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout)
    story.claim("the log shows it", done.returncode == 0 and "begin the run" in done.stdout)


def write_page(story: Story, url: str, folder: Path, runs: list[str]) -> Path | None:
    """Write the page of some runs; `None` where the libraries of the pages are missing."""
    story.chapter("The same as a page: one file that opens offline")
    if any(find_spec(name) is None for name in ("jinja2", "plotly")):
        story.say("not written: install the extra, pip install 'holdfast-registry[ui]'")
        return None
    page = folder / "report.html"
    holdfast = Path(sys.executable).with_name("holdfast")
    done = subprocess.run(
        [str(holdfast), "page", *runs, "-r", url, "--to", str(page), "--force"], check=False
    )
    story.claim("the page has every run", done.returncode == 0 and _names_all(page, runs))
    return page


def _names_all(page: Path, runs: list[str]) -> bool:
    text = page.read_text(encoding="utf-8")
    return all(run in text for run in runs)


@contextmanager
def s3_server() -> Iterator[str]:
    """Serve S3 on this machine and lead every AWS client of this process and its children there."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(HERE / "s3_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            del os.environ[name]
        os.environ |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "demo",
            "AWS_SECRET_ACCESS_KEY": "demo",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "NO_PROXY": "127.0.0.1",
        }
        try:
            yield endpoint
        finally:
            process.kill()


def mirror(story: Story, reg: Registry, endpoint: str) -> str:
    """Copy the registry to a bucket; return its URL there."""
    import boto3

    far = f"s3://{BUCKET}/team"
    story.chapter(f"A prefix of a bucket is a registry, too: {far} at {endpoint}")
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    with holdfast.init(far) as there:
        began = time.monotonic()
        report = holdfast.sync(reg, there)
        took_s = time.monotonic() - began
        story.say(f"synced {len(report.runs)} runs: {size(report.bytes_copied)}, {took_s:.1f} s")
        ids = [
            {name: [ck.digest for ck in side.run(name).checkpoints()] for name in side.run_names()}
            for side in (reg, there)
        ]
        story.claim("it holds the same runs, with the same ids", ids[0] == ids[1])
    return far


def bring_home(story: Story, reg: Registry, far: str, run_id: str) -> None:
    """Copy back what the evaluator reported at the mirror."""
    before = reg.checkpoint(f"{run_id}/best").metrics
    report = holdfast.sync(far, reg, [run_id])
    after = reg.checkpoint(f"{run_id}/best").metrics
    story.claim(
        f"a sync back brings its report home: {report.runs[0].commits} commit, "
        f"{report.bytes_copied} bytes of data",
        "test_accuracy" not in before and "test_accuracy" in after and not report.bytes_copied,
    )


def verify(story: Story, url: str) -> None:
    """Verify a registry whole."""
    with holdfast.open(url, read_only=True) as reg:
        began = time.monotonic()
        report = reg.verify(deep=True)
        took_s = time.monotonic() - began
        read = f"{report.checkpoints} checkpoints, {size(report.bytes_checked)}, {took_s:.1f} s"
        story.claim(f"{url} is sound ({read})", report.ok)
        for finding in report.findings:
            story.say(f"{finding.severity}: {finding.message}")


def describe(ck: Checkpoint) -> str:
    """Return a checkpoint in one line."""
    loss = ck.metrics["validation_loss"]
    return f"step {ck.step:4}  validation loss {loss:.4f}  {size(ck.size_bytes)}  {ck.digest.short}"


def bytes_in(folder: Path) -> int:
    """Return what the registry takes on disk."""
    files = [file for file in (folder / "registry").rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def size(size_bytes: int) -> str:
    """Return a number of bytes for people, in the units that Holdfast prints."""
    if size_bytes < 2**20:
        return f"{size_bytes / 2**10:.1f} KiB"
    return f"{size_bytes / 2**20:.1f} MiB"


def shown(path: Path) -> str:
    """Return a path as it can be typed here, the short way where there is one."""
    here = Path.cwd()
    path = here / path
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


if __name__ == "__main__":
    sys.exit(main())
