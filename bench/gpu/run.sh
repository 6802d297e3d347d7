#!/usr/bin/env bash
# bench/gpu/run.sh TOKENIZER [options]: check and time jfbatch on one GPU within five minutes, without a network.
# TOKENIZER is a tokenizer.json, its .gz, or a directory with one. Everything else is made here: random weights
# of a 1.5B Qwen 2 and an 8B Llama on the device. Prints a table and writes bench/results/gpu-CARD.json.
# Without a GPU, `--device cpu --tiny` runs every line of it at a small size.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$python" -m bench.gpu --tokenizer "$@"
