"""Play: the demo. It runs a trainer, an environment and replicas as separate processes that share only URLs.

`programs` has their command lines, `processes` starts and stops them, `scenario` is the course of the demo, and `proof`
compares the weights at the end. The programs are in `examples/wordle`.
"""
