"""Play: the demo. A trainer, an environment and replicas as processes of their own, which share nothing but URLs.

`processes` starts and ends them, `programs` says which programs they are, `scenario` is what happens, `proof` compares
the bits in the end. The programs are in `examples/wordle`.
"""
