"""examples/core_loop.py with four experts in each layer, spread over all ranks."""

import sys

from launch import ROOT

sys.path.insert(0, str(ROOT))
CHANGES = {
    "add_bias_linear=False,": "add_bias_linear=BIASES, num_moe_experts=4, moe_ffn_hidden_size=64, moe_router_topk=2, "
    "moe_grouped_gemm=True, deallocate_pipeline_outputs=True, moe_token_dispatcher_type='alltoall', "
    "expert_model_parallel_size=torch.distributed.get_world_size(), moe_router_load_balancing_type='none',",
    "get_gpt_layer_local_spec()": "get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=True)",
    "initialize_model_parallel()": "initialize_model_parallel(expert_model_parallel_size="
    "torch.distributed.get_world_size())",
}
words = {"biases", "dense", "owned"} & set(sys.argv)  # owned: enable(experts=True); dense: a model without experts
sys.argv = [word for word in sys.argv if word not in words]
source = (ROOT / "examples/core_loop.py").read_text()
if "owned" in words:
    CHANGES = {**({} if "dense" in words else CHANGES), "enable(level, ": "enable(level, experts=True, "}
for old, new in CHANGES.items():
    assert old in source, old
    source = source.replace(old, new)
exec(compile(source.replace("BIASES", str("biases" in words)), "core_loop.py", "exec"), {"__name__": "__main__"})
