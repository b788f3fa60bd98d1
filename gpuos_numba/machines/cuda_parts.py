"""A process that compiles: symbols arrive as arguments, their PTX leaves as JSON on standard output.

python -m gpuos_numba.machines.cuda_parts THREADS SYMBOL...
"""

from __future__ import annotations

import json
import sys
import warnings

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    from gpuos_numba.machines import cuda_compile

    threads, symbols = int(sys.argv[1]), sys.argv[2:]
    print(json.dumps({symbol: cuda_compile.compile_part(symbol, threads, "ptx") for symbol in symbols}))
