"""The public surface in one place (field report K5): a name that goes or comes changes this list and the changelog together."""

from __future__ import annotations

from importlib import import_module

import pytest

SURFACE = {
    "podium": """
        __version__
    """,
    "podium.algorithms": """
        AdvantageEstimator Advantages Aggregation ENTROPIES GRPO GroupStatistics KLTerm KL_ESTIMATORS LOG_PROBS Loss LossSum
        Outputs PPOClip PolicyLoss PolicyTokens RLOO Reinforce RewardedRows SFTLoss Surrogate group_ids kl_estimates kl_of_rows
        kl_of_tokens logprobs_and_entropies output_of within_counted
    """,
    "podium.checkpoint": """
        Checkpoint CheckpointStore FileEntry Manifest Saver WrittenFiles file_entry load_roles load_state save_roles save_state
        sync write_manifest
    """,
    "podium.compat.verl": """
        all_gather_data_proto ClassWithInitArgs collate_fn collect_all_to_all collect_dp_compute_data_proto
        collect_nd_compute_dataproto ColocatedWorker create_colocated_worker_cls create_colocated_worker_cls_fused
        create_colocated_worker_raw_cls DataProto DataProtoFuture DataProtoItem deserialize_single_tensor
        deserialize_tensordict Dispatch dispatch_all_to_all dispatch_dp_compute dispatch_dp_compute_data_proto
        DISPATCH_MODE_FN_REGISTRY dispatch_nd_compute_dataproto dispatch_one_to_all DispatchMode Execute extract_pg_from_exist
        fold_batch_dim get_predefined_dispatch_fn initialize_global_process_group_ray MAGIC_ATTR
        make_nd_compute_dataproto_dispatch_fn merge_resource_pool pad_dataproto_to_divisor parallel_put RayClassWithInitArgs
        RayResourcePool RayWorkerGroup register register_dispatch_mode ResourcePool ResourcePoolManager
        serialize_single_tensor serialize_tensordict sort_placement_group_by_node_ip split_resource_pool SubRayResourcePool
        unfold_batch_dim union_numpy_dict union_tensor_dict unpad_dataproto update_dispatch_mode Worker WorkerGroup
    """,
    "podium.config": """
        ActorConfig AdvantageConfig AlgorithmConfig EngineConfig FSDP2Config GRPOConfig HFRolloutConfig Json ModelConfig
        OptimConfig PPOClipConfig PartOf PartSettings PolicyLossConfig ProfilerConfig RefConfig RewardConfig RolloutConfig
        RunConfig SamplingConfig Settings TaskConfig TrackerConfig
        TrainerConfig WarmupConfig check explain optimizer_steps_per_step part_sections read_yaml resolve rows_per_step
        settings_called sources_of to_yaml total_optimizer_steps with_absolute_names write_value
    """,
    "podium.datasets": """
        StepSampler prompt_batch prompt_tokens special_token_remarks supervised_batch
    """,
    "podium.engines": """
        BaseEngine EngineContext StepResult get_device_name get_nccl_backend get_torch_device
        get_visible_devices_keyword pick_device set_numa_affinity
    """,
    "podium.models": """
        BUILT_IN RowLimit check_model_path eos_token_ids fetch_model load_model load_model_config load_tokenizer local_folder
        model_folder pad_token_id row_limit save_model
    """,
    "podium.observability": """
        CPU_S DRIVER_MB LAYOUT_FRAC LOG_PROB_GAP Last METRICS_FILE Max Mean Metric Metrics Min Phase Progress RESPONSE_LENGTH
        REWARD Recorder RunInfo SAMPLES_FILE STEP_S Sample SpanListener Spans Status Sum THROUGHPUT TIMING_PREFIX TOKENS_PER_S
        Tracker Trackers VALIDATION_SCORE WARMUP_LOSS draw_curve read_rows
    """,
    "podium.parts": """
        ADVANTAGE_ESTIMATORS ENGINES POLICY_LOSSES PartTable REWARDS ROLLOUTS Row SourceFile Sources TASKS TRACKERS TRAINERS
        edited read_sources split_name write_sources
    """,
    "podium.protocol": """
        AUTO_PADDING_KEY Batch DataProto DataProtoItem Field Mergeable PADDING_ROWS_KEY check_fields column_names
        concat_rows from_padded interleave_groups is_rows jagged_from_rows marks_of_padding num_rows object_column
        pad_dataproto_to_divisor partition_rows to_padded unpad_dataproto whole_number with_padding without_padding
    """,
    "podium.recipes": """
        RECIPES recipe
    """,
    "podium.rollout": """
        BaseRollout RolloutContext
    """,
    "podium.single_controller": """
        CallStatus CAPABILITIES Capabilities collect_all_to_all collect_dp_compute_data_proto
        collect_nd_compute_dataproto ColocatedWorker Copy create_colocated_worker_cls create_colocated_worker_raw_cls
        DataProtoFuture Dispatch dispatch_all_to_all dispatch_dp_compute dispatch_dp_compute_data_proto
        dispatch_nd_compute_dataproto dispatch_one_to_all DispatchMode Execute FutureList get_predefined_dispatch_fn
        GroupCall GroupFuture GroupStatus Init MAGIC_ATTR make_nd_compute_dataproto_dispatch_fn merge_resource_pool
        Mesh PerRank recorded_traffic register register_dispatch_mode Registration ResourcePool
        Route split_resource_pool State Traffic update_dispatch_mode Worker WorkerGroup
    """,
    "podium.tasks": """
        CountTokens Failed Message Outcome Problem Prompt RewardInputs Rewards Score Scorer Split Task TaskContext build_task
        check_disjoint check_reward draw_targets task_fingerprint
    """,
    "podium.testing": """
        CALL_CHECKS LIFECYCLE_CHECKS check_runtime contract_group
    """,
    "podium.trainers": """
        PPOTrainer RunDirectory SFTTrainer Scores Session Trainer TrainerContext evaluate_model run
    """,
    "podium.weights": """
        copy_weights named_weights
    """,
    "podium.workers": """
        ActorRolloutRefWorker DistProfiler DistProfilerExtension FIELDS PolicySpec Role
        TrainingSpec TrainingWorker policy_loss
    """,
}


@pytest.mark.parametrize("package", SURFACE)
def test_the_public_names_are_those_of_the_list(package):
    assert sorted(import_module(package).__all__) == sorted(SURFACE[package].split())
