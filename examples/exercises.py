"""Exercises: the body of a function is removed, and its tests say when it is right.

    python examples/exercises.py list                     the exercises, as the files come
    python examples/exercises.py start model.rms_norm     remove the body of the function
    python examples/exercises.py check model.rms_norm     run the tests that decide
    python examples/exercises.py solution model.rms_norm  restore the body from git

The signature and the docstring stay, and so do all other edits of the file.
"""

import ast
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent

# A function, and parts of the names of the tests in test_all.py that decide.
EXERCISES = {
    "model.rms_norm": "lesson_model_rms_norm",
    "model.relative_bucket": "lesson_model_near_positions relative_buckets_equal",
    "model.dot_product_attention": "lesson_model_attention_is_a_weighted_mean",
    "model.token_metrics": "lesson_model_the_loss_of_two_tokens the_loss_equals_that_of_t5x",
    "data.random_segmentation": "segmentations_are_equally_likely lesson_data_span_corruption",
    "data.corrupt_spans": "lesson_data_span_corruption",
    "data.pack": "lesson_data_packing lesson_data_the_longest",
    "data.shift_right": "lesson_data_packed_examples_have_segments",
    "train.learning_rate": "lesson_train_the_learning_rate learning_rates_equal_recorded",
    "train.clip_and_scale": "lesson_train_two_updates each_layer_as_an_array_of_its_own",
    "infer.filter_logits": "top_k_and_top_p_keep",
    "infer.extend_beams": "lesson_infer_a_wide_beam_search the_search_goes_on_while",
    "partition.spec": "lesson_partition_rules",
    "evaluate.rank_classification": "lesson_evaluate_the_most rank_classification_equals",
}


def find(text: str, name: str) -> tuple[list[str], int, int, str]:
    """Return the lines of a file, the bounds of a body in them, and the docstring."""
    try:
        functions = [x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef)]
    except SyntaxError as error:
        raise SystemExit(f"Line {error.lineno} is no Python: {error.msg}.") from None
    for node in functions:
        if node.name == name:
            first, last = node.body[0].end_lineno, node.end_lineno
            if not (docstring := ast.get_docstring(node)):
                raise SystemExit(f"First write the docstring of {name} again.")
            return text.split("\n"), first, last, docstring
    raise SystemExit(f"There is no function {name} any more.")


def read(exercise: str) -> tuple[Path, list[str], int, int, list[str]]:
    """Return the file, its lines, where the body is, and the body in the last commit."""
    file, name = exercise.split(".")
    path = HERE / f"{file}.py"
    git = ["git", "show", f"HEAD:./{path.name}"]
    committed = subprocess.run(git, cwd=HERE, capture_output=True, check=True).stdout
    lines, first, last, _ = find(committed.decode(), name)
    return path, *find(path.read_text(), name)[:3], lines[first:last]


def start(exercise: str) -> None:
    path, lines, first, last, body = read(exercise)
    if lines[first:last] != body:
        raise SystemExit(f"{exercise} has been edited. Its `solution` restores it first.")
    lines[first:last] = ["    raise NotImplementedError"]
    path.write_text("\n".join(lines))
    print(f"Write the body at line {first + 1} of {path.name}, and run\n")
    print(f"    {shlex.join(['python', *test(exercise)])}")


def solution(exercise: str) -> None:
    path, lines, first, last, body = read(exercise)
    lines[first:last] = body
    path.write_text("\n".join(lines))


def test(exercise: str) -> list[str]:
    """Return the arguments of Python that run the tests of an exercise."""
    names = " or ".join(EXERCISES[exercise].split())
    return ["-m", "pytest", "-n", "0", "test_all.py", "-k", names]


def main() -> None:
    verb, *names = sys.argv[1:] or ["help"]
    if verb == "list" and not names:
        for exercise in EXERCISES:
            file, name = exercise.split(".")
            docstring = find((HERE / f"{file}.py").read_text(), name)[3]
            print(f"{exercise}\n    {docstring.splitlines()[0]}")
            print(f"    {shlex.join(['python', *test(exercise)])}\n")
    elif verb in ("start", "check", "solution") and {*names} & {*EXERCISES}:
        if verb == "check":
            command = [sys.executable, *test(names[0])]
            raise SystemExit(subprocess.run(command, cwd=HERE).returncode)
        start(names[0]) if verb == "start" else solution(names[0])
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
