// The search runs in a Worker, which browsers do not start from file://. There it runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #port;

    constructor(url) {
      super();
      const { port1, port2 } = new MessageChannel();
      this.#port = port1;
      port1.onmessage = ({ data }) => {
        const event = new MessageEvent("message", { data });
        this.onmessage?.(event);
        this.dispatchEvent(event);
      };
      this.#frame.hidden = true;
      this.#frame.addEventListener("load", () => this.#start(url, port2), { once: true });
      document.body.append(this.#frame);
    }

    #start(url, port) {
      const scope = this.#frame.contentWindow;
      scope.postMessage = (data) => port.postMessage(data);
      const script = scope.document.createElement("script");
      script.src = url;
      // Messages wait in the port until then.
      script.addEventListener("load", () => {
        port.onmessage = ({ data }) => scope.dispatchEvent(new MessageEvent("message", { data }));
      });
      scope.document.body.append(script);
    }

    postMessage(data) {
      this.#port.postMessage(data);
    }

    terminate() {
      this.#port.close();
      this.#frame.remove();
    }
  };
}
