"""Several ranks as one publisher: each uploads its own rows, and rank 0 commits them as one version."""
