"""Turns a GGUF file that transformers can read into a safetensors checkpoint directory.

    python tools/gguf_to_checkpoint.py FILE.gguf DIRECTORY

Weights are written in bfloat16, as such models are released: its rounding is far below the steps of a file quantised
to 4 bits. Tokenizer, chat template and generation config come along.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def convert(gguf: Path, directory: Path) -> Any:
    """Write `directory` from `gguf`; returns the model that was saved."""
    import torch
    import transformers

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model read from GGUF carries its quantisation and refuses to be saved; a fresh one of the same class does not.
    config = type(loaded.config)(**_plain(loaded.config))
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    tokenizer.save_pretrained(directory)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    transformers.GenerationConfig(**ends).save_pretrained(directory)
    return model


def _plain(config: Any) -> dict[str, Any]:
    drop = {"quantization_config", "_name_or_path", "torch_dtype", "dtype", "transformers_version"}
    return {key: value for key, value in config.to_dict().items() if key not in drop}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    convert(arguments.gguf, arguments.directory)


if __name__ == "__main__":
    main()
