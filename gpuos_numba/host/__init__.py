"""The producer's half: claim, publish, wait, retire. Never imports `device` or numba.cuda."""
