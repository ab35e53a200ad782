"""Megatron options that parse and change nothing: slime sets what they set, or never calls what reads them.

Options whose readers are all in Megatron's own training loop, tokenizers, logging or start-up; found by searching its
source (core 0.19.2) for each. One that is given ends the command with the reason, as :mod:`slime_cli.options.managed`
does.
"""

_BY_REASON: dict[str, str] = {
    "slime computes log-probabilities and the loss itself": (
        """
        fp16_lm_cross_entropy cross_entropy_loss_fusion cross_entropy_fusion_impl
    """
    ),
    "the embedding keeps the rows that the checkpoint has: slime never pads it": (
        """
        padded_vocab_size pad_vocab_size vocab_extra_ids
    """
    ),
    "slime takes the tokenizer and the chat template of --hf-checkpoint": (
        """
        tokenizer_type tokenizer_model vocab_file merge_file metadata_path special_tokens
        tiktoken_num_special_tokens tiktoken_pattern tokenizer_hf_no_include_special_tokens
        tokenizer_hf_no_use_fast sft sft_tokenizer_prompt_format
        tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_sentencepiece_legacy null_tokenizer_eod_id
        null_tokenizer_pad_id
    """
    ),
    "slime says itself what is loaded: the weights of --load begin a run, and a resume begins at its last commit": (
        """
        finetune no_load_optim no_load_rng exit_on_missing_checkpoint pretrained_checkpoint
        auto_detect_ckpt_format use_checkpoint_args use_mp_args_from_checkpoint_args
        use_tokenizer_model_from_checkpoint_args override_ckpt_iteration non_persistent_ckpt_type
        non_persistent_global_ckpt_dir non_persistent_local_ckpt_algo non_persistent_local_ckpt_dir
        non_persistent_save_interval
    """
    ),
    "slime writes its own metrics, to metrics.jsonl in the run's folder, and spans: slime trace": (
        """
        tensorboard_dir tensorboard_log_interval tensorboard_queue_size wandb_entity wandb_exp_name
        wandb_project wandb_save_dir log_interval log_throughput log_energy log_loss_scale_to_tensorboard
        log_memory_interval log_memory_to_tensorboard log_params_norm log_timers_to_tensorboard
        log_validation_ppl_to_tensorboard log_world_size_to_tensorboard timing_log_level timing_log_option
        enable_one_logger one_logger_async one_logger_project one_logger_run_name
        app_tag_run_name app_tag_run_version check_for_spiky_loss log_device_memory_used logging_level
    """
    ),
    "it profiles Megatron's own training loop, which slime does not run; use slime profile": (
        """
        profile_step_start profile_step_end use_pytorch_profiler pytorch_profiler_collect_callstack
        pytorch_profiler_collect_chakra pytorch_profiler_collect_shapes record_shapes nvtx_ranges
        memory_snapshot_path moe_routing_trace_capture_hidden_states moe_routing_trace_capture_logits
        moe_routing_trace_dump_weights moe_routing_trace_max_training_iters moe_routing_trace_path
        profile_ranks record_memory_history
    """
    ),
    "it belongs to Megatron's own training loop, which slime does not run": (
        """
        manual_gc manual_gc_eval manual_gc_interval exit_signal exit_signal_handler
        exit_signal_handler_for_dataloader exit_signal_handler_for_training train_sync_interval
        check_weight_hash_across_dp_replicas_interval adlr_autoresume adlr_autoresume_interval log_straggler
        straggler_ctrlr_port straggler_minmax_count disable_straggler_on_startup empty_unused_memory_level
        save_activations_interval save_dgrads_interval save_params_interval save_wgrads_interval
        save_tokens_per_expert_interval gpu_sniff_test_interval run_workload_inspector_server
        phase_transition_iterations distributed_timeout_seconds_after_init
    """
    ),
    "it belongs to Megatron's own generation and RL: slime's engines are SGLang": (
        """
        decode_only_cuda_graphs grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_entropy_term_weight
        grpo_filter_groups_with_same_reward grpo_kl_beta inference_coordinator_port
        inference_cuda_graph_all_prefills inference_disable_ep_consensus inference_dynamic_batching
        inference_dynamic_batching_async_sched_mode inference_dynamic_batching_block_size
        inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_logprobs_mode inference_dynamic_batching_mamba_memory_ratio
        inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens
        inference_dynamic_batching_paused_buffer_size_gb inference_dynamic_batching_sampling_backend
        inference_dynamic_batching_track_generated_token_events
        inference_dynamic_batching_track_paused_request_events inference_logging_step_interval
        inference_shards inference_text_gen_server_logging inference_use_synchronous_zmq_collectives
        inference_wandb_logging langrl_env_config max_tokens_to_oom output_bert_embeddings
    """
    ),
    "Megatron's watchdogs do not run: a run that is started again resumes after its last commit": (
        """
        calc_ft_timeouts enable_ft_package flight_recorder_dump_on_timeout flight_recorder_dump_path
        flight_recorder_extra_dump_on_exec flight_recorder_include_only_active
        flight_recorder_include_stack_trace flight_recorder_trace_buffer_size ft_num_warmup_iters
        inprocess_active_world_size inprocess_barrier_timeout inprocess_completion_timeout
        inprocess_empty_cuda_cache inprocess_granularity inprocess_hard_timeout inprocess_heartbeat_interval
        inprocess_heartbeat_timeout inprocess_last_call_wait inprocess_max_iterations
        inprocess_monitor_process_interval inprocess_monitor_thread_interval
        inprocess_progress_watchdog_interval inprocess_restart inprocess_soft_timeout
        inprocess_termination_grace_time replication_factor rerun_mode
    """
    ),
    "slime feeds the trainer from its rollouts: --prompt-data": (
        """
        allow_ambiguous_pad_tokens chat_template data_cache_path data_per_class_fraction
        dataloader_defer_npy_index_mmap dataloader_fast_cache_load eod_mask_loss fim_fragment_rate
        fim_no_prefix fim_split_sample full_validation logits_load_decode_threads logits_load_dir
        logits_load_ignore_errors logits_load_kd_loss_alpha logits_load_msc_prefetch_depth
        logits_load_prefetch_factor logits_save_dtype logits_save_top_p logits_save_top_p_min_k mask_factor
        mask_prob mask_type mid_level_dataset_surplus multiple_validation_sets num_workers
        object_storage_cache_path per_dataset_sequences_path reset_attention_mask reset_position_ids
        short_seq_prob trust_remote_code validation_set_names
    """
    ),
    "it belongs to models that slime does not train": (
        """
        bert_embedder_type bert_load biencoder_projection_dim biencoder_shared_query_context_model
        block_data_path classes_fraction dino_bottleneck_size dino_freeze_last_layer dino_head_hidden_size
        dino_local_crops_number dino_local_img_size dino_norm_last_layer dino_teacher_temp
        dino_warmup_teacher_temp dino_warmup_teacher_temp_epochs embedding_path evidence_data_path
        head_lr_mult ict_head_size ict_load indexer_batch_size indexer_log_interval iter_per_epoch
        moe_upcycling_granularity num_channels num_classes onnx_safe query_in_block_prob
        retriever_report_topk_accuracies retriever_score_scaling swin_backbone_type titles_data_path
        use_one_sent_docs vision_backbone_type vision_pretraining vision_pretraining_type
    """
    ),
    "nothing that slime runs of Megatron reads it": (
        """
        align_grad_reduce dist_ckpt_save_pre_mcore_014 enable_full_sharding_in_hsdp
        init_method_xavier_uniform lazy_mpu_init tp_comm_overlap_cfg use_flash_attn use_tp_pp_dp_mapping
    """
    ),
}

UNREAD: dict[str, str] = {dest: reason for reason, dests in _BY_REASON.items() for dest in dests.split()}
"""Dest -> reason."""
