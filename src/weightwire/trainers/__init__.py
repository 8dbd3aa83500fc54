"""Train: one module per framework. Import only the one you use: each needs its framework."""
