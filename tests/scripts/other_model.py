"""What Megatron's scripts for other models than its GPT do, such as pretrain_t5.py, until they build the model."""

from megatron.core.models.T5 import T5Model
from megatron.training.arguments import parse_and_validate_args

if __name__ == "__main__":
    parse_and_validate_args()
    print(f"would train a {T5Model.__name__}")
