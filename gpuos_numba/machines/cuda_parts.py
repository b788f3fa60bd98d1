"""A process that compiles: symbols arrive as arguments, their PTX leaves on standard output.

python -m gpuos_numba.machines.cuda_parts THREADS SYMBOL...
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings

if __name__ == "__main__":
    # Only the answer goes to the pipe, whatever the tools print.
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    from gpuos_numba.machines import cuda_compile

    threads, symbols = int(sys.argv[1]), sys.argv[2:]
    parts = {symbol: cuda_compile.compile_part(symbol, threads) for symbol in symbols}
    answer.write(pickle.dumps(parts))
    answer.close()
