"""The Triton kernels, one op per file. Importing this package imports no Triton; importing one of its files does."""
