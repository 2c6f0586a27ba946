"""Speed of whole engine steps: a model of released widths cut to a few layers, random weights.

python -m benchmarks.engine             on a GPU
python -m benchmarks.engine --tiny      a rehearsal on a CPU
"""
