"""Mutation tests: faults are put into copies of the tree one at a time; which of them do the tests catch?

`operators` generates the faults, `coverage` records which tests execute a function, and the program

    python -m benchmarks.mutants [--package vehicle] [--count 20] [--seed 0] [--json benchmarks/results/mutants.json]

samples faults of each package, runs the tests that cover them and reports the survivors. tests/mutants.yaml adds faults
that are written by hand.
"""
