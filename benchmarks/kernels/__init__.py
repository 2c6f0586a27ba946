"""Device times of every kernel at the released model's shapes, with floors and peers of the same run.

`python -m benchmarks.kernels [module ...]` runs the modules of this folder that have
`measure(harness) -> list[row]` and writes benchmarks/results/kernels-<device>.json.
"""
