"""What other libraries call our settings, so that an error can name the right key."""

from __future__ import annotations

# Names of TRL, transformers and peft -> our key, or what to do instead. Only read to word an error.
FOREIGN_NAMES = {
    # model
    "model_name_or_path": "model.path",
    "model_name": "model.path",
    "model_revision": "model.revision",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "chat_template_path": "model.chat_template",
    "bf16": "model.dtype bfloat16",
    "fp16": "float16 is not supported: model.dtype is float32 or bfloat16",
    # data
    "dataset_name": "data.path",
    "train_file": "data.path",
    "dataset_train_split": "data.split",
    "dataset_test_split": "data.eval_split",
    "dataset_text_field": "data.text_column",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "max_new_tokens": "rollout.max_completion_length",
    "train_on_responses_only": "data.completion_only_loss",
    "shuffle_dataset": "data.shuffle",
    # train
    "per_device_train_batch_size": "train.micro_batch_size",
    "per_device_eval_batch_size": "evaluation uses train.micro_batch_size: leave it out",
    "generation_batch_size": "rollout.steps_per_generation",
    "use_vllm": "rollout.engine",
    "generation_kwargs": "each sampling option is a key of rollout: rollout.top_p, ...",
    "global_batch_size": "train.batch_size",
    "num_train_epochs": "train.num_epochs",
    "epochs": "train.num_epochs",
    "lr": "train.learning_rate",
    "lr_scheduler_type": "train.lr_scheduler",
    "warmup_ratio": "a share of the run is not supported: give train.warmup_steps",
    "optim": "train.optimizer",
    "clip_grad_norm": "train.max_grad_norm",
    "eval_steps": "train.eval_every",
    "eval_strategy": "train.eval_every says when: steps between evaluations",
    "full_determinism": "train.deterministic",
    # losses
    "ref_model": "model.ref_path",
    "ref_model_name_or_path": "model.ref_path",
    "precompute_ref_batch_size": "the reference scores train.micro_batch_size items at a time",
    "rpo_alpha": "loss.loss_type [sigmoid, sft] with loss.loss_weights",
    "reference_free": "loss.loss_type simpo, orpo or cpo",
    # memory, distributed, outputs
    "gradient_checkpointing": "memory.activation_checkpointing",
    "gradient_checkpointing_kwargs": "memory.activation_checkpointing_kwargs",
    "ddp_timeout": "distributed.timeout_s",
    "fsdp": "distributed.sharding",
    "logging_steps": "logging.every",
    "report_to": "logging.tensorboard true, logging.wandb or logging.trackio with a project",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "resume_from_checkpoint": "checkpoint.resume; it finds the newest by itself",
    "disable_tqdm": "logging.progress",
    "do_eval": "eval_only",
    "use_liger_kernel": "the fused log-prob op is always used: leave it out",
}
