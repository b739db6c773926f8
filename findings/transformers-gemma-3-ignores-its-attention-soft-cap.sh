#!/usr/bin/env bash
# One would guess: attn_logit_softcapping of Gemma3TextConfig caps the scores of attention by tanh, as its documentation says, and as the
#   field of the same name does in Gemma2Config.
# What happens: transformers 5.24.0 reads it, keeps it in each layer, and never passes it to the attention of Gemma 3. At 50, at None and
#   at 0.01 the logits are the same bits; those of Gemma 2 change. final_logit_softcapping, the field next to it, is applied in both.
# Why it matters: Gemma 3 normalizes queries and keys where Gemma 2 caps the scores. Who compares the two ways, or trains with both, sets
#   this field and measures nothing. A port that does as the configuration says differs from the model it was checked against.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/env"
"$folder/env/bin/pip" install -q numpy torch==2.13.0 transformers==5.24.0
cat > "$folder/program.py" <<'PROGRAM'
import torch
import transformers
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

SIZES = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=4, head_dim=16)
print("transformers", transformers.__version__, "torch", torch.__version__)


@torch.no_grad()
def logits(config_of, model_of, attention, final):
    config = config_of(**SIZES, attn_logit_softcapping=attention, final_logit_softcapping=final, attn_implementation="eager")
    torch.manual_seed(0)
    model = model_of(config).eval()
    for parameter in model.parameters():
        parameter += 0.3 * torch.randn_like(parameter)  # larger than at first, so that attention matters
    return model(torch.arange(32)[None]).logits


changes = {}
for config_of, model_of in ((Gemma2Config, Gemma2ForCausalLM), (Gemma3TextConfig, Gemma3ForCausalLM)):
    reference = logits(config_of, model_of, None, None)
    for caps in ((50.0, None), (0.01, None), (None, 0.01)):
        change = float((logits(config_of, model_of, *caps) - reference).abs().max())
        changes[model_of, caps] = change
        print(f"{model_of.__name__}: attn_logit_softcapping={caps[0]}, final_logit_softcapping={caps[1]}: logits change by {change:.3g}")
second, third = ([changes[model_of, caps] for caps in ((0.01, None), (None, 0.01))] for model_of in (Gemma2ForCausalLM, Gemma3ForCausalLM))
ignored = changes[Gemma3ForCausalLM, (50.0, None)] == 0 == third[0]
raise SystemExit(not (ignored and min(second) > 0.1 and third[1] > 0.1))
PROGRAM
HF_HUB_OFFLINE=1 "$folder/env/bin/python" "$folder/program.py"
