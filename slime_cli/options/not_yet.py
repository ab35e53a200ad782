"""Options that this slime does not have, or not yet, and what there is in their place.

Invariant (a test holds it): none of NOT_YET, which are of slime's launch scripts, is an option here. Whoever adds such
an option takes its name out.
"""

_TEXT = """
--update-weight-disk-dir --update-weight-disk-keep-files
    leave it out: versions are files under the run directory, and those that a resume needs stay

--check-weight-update-equal
    leave it out: every version is proven in every engine

--rollout-buffer-url --fetch-trajectory-retry-times --min-batch-collection-ratio --rollout-task-type
    leave it out: no server of rollouts is asked; --custom-generate-function-path generates one sample,
    --custom-rm-path rewards it

--dump-details
    leave it out: RUN/rollouts/NNNNNN/samples.parquet holds every sample of every rollout, and
    --save-debug-train-data what it was trained on

--load-forge-rollout-data
    use --load-debug-rollout-data, which starts no engines

--disable-rollout-global-dataset
    leave it out: --data-source-path names a class that deals prompts in place of a data set

--release-train
    use --offload-train: the trainer's processes stay, and give their memory back

--use-fault-tolerance --rollout-health-check-interval --rollout-health-check-timeout
--rollout-health-check-first-wait
    leave it out: an engine that dies leaves the router, and the run continues with the others

--ci-test --ci-disable-kl-checker --ci-train-rollout-logprob-abs-diff-threshold --ci-save-grad-norm
--ci-load-grad-norm
    leave it out: it belongs to slime's own tests

--log-multi-turn --log-passrate --log-reward-category --log-correct-samples --use-rollout-entropy
    leave it out: every number is in metrics.jsonl, and `slime trace` says what became of each sample

--prefill-num-servers --num-gpus-per-node
    leave it out: all engines of a run are alike; start others with `slime serve-rollout` and name them with
    --rollout-endpoint

--rollout-external-engine-addrs
    --rollout-endpoint names a running `slime serve-rollout` by its endpoint.json

--allgather-cp --freeze-indexer --megatron-deepgemm-forward-layers --megatron-deepgemm-forward-modules
--megatron-deepgemm-moe-forward-layers --megatron-deepgemm-moe-forward-modules
    models with sparse attention (GLM-5, DeepSeek-V3.2) are not trained here: docs/models.md lists those that are

--multimodal-keys
    only text is trained: leave it out, and give data without images

--data-pad-size-multiplier --log-probs-max-tokens-per-gpu
    leave it out: --max-tokens-per-gpu bounds a micro-batch

--rollout-data-transport
    leave it out: samples reach the trainer through Ray's object store

--start-rollout-id
    leave it out: a run that is started again resumes after its last commit

--ref-ckpt-step
    name the checkpoint's own folder: --ref-load DIR/iter_NNNNNNN

--opd-teacher-ckpt-step
    name the checkpoint's own folder: --opd-teacher-load DIR/iter_NNNNNNN

--recompute-loss-function
    leave it out: the loss takes --log-probs-chunk-size response tokens at a time

--memory-snapshot-dir --memory-snapshot-num-steps --memory-recorder --profile-target
    leave it out: see `slime profile`

--train-env-vars
    set the variables where you start the command: its trainers inherit them

--http-proxy
    leave it out: set HTTP_PROXY for services outside; engines and routers are asked directly

--use-distributed-post
    leave it out: one process asks the router

--sglang-router-request-timeout-secs
    use --router-request-timeout-secs
"""
"""Blocks: lines of flags, then the sentence about them all."""


def _read(text: str) -> dict[str, str]:
    found = {}
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        sentence = " ".join(line.strip() for line in lines if line.startswith(" "))
        found |= {flag: sentence for line in lines if not line.startswith(" ") for flag in line.split()}
    return found


NOT_YET: dict[str, str] = _read(_TEXT)
"""Flag -> what to do instead."""

NOT_WIRED: dict[str, str] = {}
"""Flags of options that are declared and that nothing reads yet -> what to do instead. Whoever wires one takes its line
out."""
