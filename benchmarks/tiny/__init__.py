"""The shipped tiny checkpoint: its data, its training, its export and its evaluation.

Run order, each one command: `python -m benchmarks.tiny.train`, `python -m benchmarks.tiny.export`,
`python -m benchmarks.tiny.evaluate`.
"""
