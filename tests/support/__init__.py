"""The parts that the tests of several folders share; fixtures are in the `conftest.py` of a folder.

- `states`, `sameness`, `loads`: what is saved, and whether it comes back bit for bit.
- `stores`: empty registries in memory, copies of stores, and what is in a store.
- `faults`: stores that harm, answer falsely, or let somebody else act between two calls.
- `collectors`: the steps of a collection, one at a time.
- `pictures`: all that a user sees of a registry, to compare two of them.
- `lives`: histories of a run without a store.
- `strategies`: hypothesis strategies.
- `commands`: commands within this process.
- `browsing`: a browser, as a fixture.
- `pages`: the pages of the documents, and their blocks.
- `inline`: registries without threads; `processes`: processes that start cheaply.

What only one folder needs is in that folder.
"""
