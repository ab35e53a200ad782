"""Megatron options that parse and change nothing: slime sets what they set, or never calls what reads them.

Options whose readers are all in Megatron's own training loop, tokenizers, logging or start-up; found by searching its
source (core 0.19.2) for each. One that is given ends the command with the reason, as :mod:`slime_cli.options.managed`
does.
"""

_BY_REASON: dict[str, str] = {
    "the embedding keeps the rows that the checkpoint has: slime never pads it": """
        padded_vocab_size pad_vocab_size vocab_extra_ids
    """,
    "slime takes the tokenizer and the chat template of --hf-checkpoint": """
        tokenizer_type tokenizer_model vocab_file merge_file metadata_path special_tokens
        tiktoken_num_special_tokens tiktoken_pattern tokenizer_hf_no_include_special_tokens
        tokenizer_hf_no_use_fast sft sft_tokenizer_prompt_format
        tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_sentencepiece_legacy null_tokenizer_eod_id
        null_tokenizer_pad_id
    """,
    (
        "slime says itself what is loaded: the weights of --load begin a run, and a resume goes on from its "
        "own last commit"
    ): """
        finetune no_load_optim no_load_rng exit_on_missing_checkpoint pretrained_checkpoint
        auto_detect_ckpt_format use_checkpoint_args use_mp_args_from_checkpoint_args
        use_tokenizer_model_from_checkpoint_args override_ckpt_iteration non_persistent_ckpt_type
        non_persistent_global_ckpt_dir non_persistent_local_ckpt_algo non_persistent_local_ckpt_dir
        non_persistent_save_interval
    """,
    "slime writes its own metrics, to metrics.jsonl in the run's folder, and spans: slime trace": """
        tensorboard_dir tensorboard_log_interval tensorboard_queue_size wandb_entity wandb_exp_name
        wandb_project wandb_save_dir log_interval log_throughput log_energy log_loss_scale_to_tensorboard
        log_memory_interval log_memory_to_tensorboard log_params_norm log_timers_to_tensorboard
        log_validation_ppl_to_tensorboard log_world_size_to_tensorboard timing_log_level timing_log_option
        enable_one_logger one_logger_async one_logger_project one_logger_run_name
    """,
    "it profiles Megatron's own training loop, which slime does not run; use slime profile": """
        profile_step_start profile_step_end use_pytorch_profiler pytorch_profiler_collect_callstack
        pytorch_profiler_collect_chakra pytorch_profiler_collect_shapes record_shapes nvtx_ranges
    """,
    "it belongs to Megatron's own training loop, which slime does not run": """
        manual_gc manual_gc_eval manual_gc_interval exit_signal exit_signal_handler
        exit_signal_handler_for_dataloader exit_signal_handler_for_training train_sync_interval
        check_weight_hash_across_dp_replicas_interval adlr_autoresume adlr_autoresume_interval log_straggler
        straggler_ctrlr_port straggler_minmax_count disable_straggler_on_startup empty_unused_memory_level
        save_activations_interval save_dgrads_interval save_params_interval save_wgrads_interval
        save_tokens_per_expert_interval gpu_sniff_test_interval run_workload_inspector_server
        phase_transition_iterations distributed_timeout_seconds_after_init
    """,
}

UNREAD: dict[str, str] = {dest: reason for reason, dests in _BY_REASON.items() for dest in dests.split()}
"""Dest -> reason."""
