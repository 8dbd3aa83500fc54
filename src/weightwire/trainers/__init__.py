"""Train: one module per framework, each imported only by its users. They know publishers; nobody knows them."""
