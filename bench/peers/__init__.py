"""Other programs on the same rows, prompts and weights, in turn with jfbatch: `python -m bench.peers`."""
