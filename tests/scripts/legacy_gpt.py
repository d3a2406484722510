"""A GPT the older way: a script with a model_provider, which builds GPTModel itself, instead of a builder."""

import sys

from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from pretrain_gpt_fp8 import datasets_provider, forward_step


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


if __name__ == "__main__":
    config = pretrain_cfg_container_from_args(parse_and_validate_args())
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step, model_provider)
