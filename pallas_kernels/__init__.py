"""Array operations of GLM-5.3-Flash: one file an op, an XLA reference beside every Pallas-Triton kernel.

This package knows no model and no configuration: shapes, dtypes and indices come in as arguments.
"""
