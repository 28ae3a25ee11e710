"""Imported last by the server that starts processes: none of them looks at what it imported.

Several benchmarks and tests collect garbage again and again, which takes .1 s beside torch.
"""

import gc

gc.collect()
gc.freeze()
