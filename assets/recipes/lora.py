"""Fine-tune the tiny T5 on simple tasks with LoRA (Hu et al. 2021).

LoRA adds a product of two matrices of rank 8 to each query and value projection. All
weights of the tiny T5 are frozen, so training changes 24,576 numbers, 1.8 % of those of
tiny. After 700 steps, 86.0 % of the held-out numbers are called even or odd rightly. Such
a small adapter cannot teach the tiny T5 to write the name of a number: all outputs of
by_rule_words have a mistake. Training all weights (--config tiny_finetune) solves both.

    python train.py
    python train.py --init_from runs/tiny \
        --config assets/recipes/lora.py --run_dir runs/lora
    python convert.py runs/lora lora_hf --to hf
"""

from configs import RECIPES, override

LORA = {"model.lora": 8, "train.freeze": "(?!.*lora).*"}
TRAIN = {"train.optimizer": "adamw", "train.learning_rate": 5e-3}
CONFIG = override(RECIPES["tiny_finetune"], LORA | TRAIN)
