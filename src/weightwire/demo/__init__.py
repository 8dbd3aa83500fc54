"""The demo: a trainer, an environment and replicas as processes of their own, which share nothing but URLs.

`processes` starts and ends them, `cast` says which programs they are, `scenes` is what happens, `proof` compares the
bits in the end. The programs are in `examples/wordle`.
"""
