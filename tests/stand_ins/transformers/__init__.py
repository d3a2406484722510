"""In place of the package, what Megatron's SFTTokenizer and tools/prepare_sft.py use of it: a tokenizer of bytes.

Its chat template is SmolLM2's. A byte is its number; three more tokens begin a message, end it, and pad.
"""

import numpy as np

START, END, PAD = 256, 257, 258


class AutoTokenizer:
    bos_token_id, eos_token_id, pad_token_id = None, END, PAD
    chat_template = "<|im_start|>role\ncontent<|im_end|>\n of each message"

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str) -> "AutoTokenizer":
        return cls()

    def __len__(self) -> int:
        return PAD + 1

    def apply_chat_template(self, messages, *, tokenize: bool, add_generation_prompt: bool = False, **how):
        assert tokenize and not add_generation_prompt
        assert how.get("chat_template", self.chat_template) == self.chat_template
        ids = [
            number
            for message in messages
            for number in (START, *f"{message['role']}\n{message['content']}".encode(), END, *b"\n")
        ]
        return np.array([ids]) if how.get("return_tensors") == "np" else ids
