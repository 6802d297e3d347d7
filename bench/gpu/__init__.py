"""What jfbatch does on a GPU, in five minutes and without a network: `bench/gpu/run.sh TOKENIZER`."""
