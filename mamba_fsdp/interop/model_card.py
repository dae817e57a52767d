"""The README.md of an exported model: what it is, how it was trained as far as that is known, how to load it."""

from pathlib import Path

import mamba_fsdp
from config.presets import title
from mamba_fsdp.checkpoint.folder import Reader
from mamba_fsdp.interop.weights import Weights
from mamba_fsdp.model.spec import parameter_count
from mamba_fsdp.run_layout import COMMIT

LOADING = {
    "hf": """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained(FOLDER), AutoModelForCausalLM.from_pretrained(FOLDER)
prompt = tokenizer("Once", return_tensors="pt").input_ids
tokens = model.generate(prompt, max_new_tokens=50, do_sample=True)
print(tokenizer.decode(tokens[0]))""",
    "state-spaces": """from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

model = MambaLMHeadModel.from_pretrained(FOLDER, device="cuda")"""}


def model_card(weights: Weights, format: str, dtype: str) -> str:
    """format: a key of LOADING; dtype: of the stored numbers."""
    config, training = weights.config, "How it was trained is not known."
    if (Path(weights.source) / COMMIT).is_file():
        state = Reader(weights.source).state
        data, progress = state["settings"]["data"], state["progress"]
        training = (f"Trained for {progress['step']:,} steps on {progress['tokens']:,} tokens of "
                    f"{Path(data['dataset_path']).name} in sequences of {data['seq_length']:,}.")
    return f"""---
library_name: {"transformers" if format == "hf" else "mamba-ssm"}
pipeline_tag: text-generation
tags: [mamba_fsdp]
---
# {title(config)}

A language model of {parameter_count(config):,} parameters in {dtype}: {config.n_layer} layers {config.layers}, d_model
{config.d_model}, a vocabulary of {config.vocab_size:,}. {training}

```python
{LOADING[format]}
```

Written by mamba_fsdp {mamba_fsdp.__version__}.
"""
