r"""Do the work of pretokenize.py on a cluster, with Apache Beam.

    python -m extras.pretokenize_with_beam --config small_c4 --output gs://bucket/ids \
        --data.source 'jsonl:gs://bucket/c4-{split}.*.json.gz' \
        --data.vocab gs://bucket/spiece.model \
        --beam '--runner=DataflowRunner --project=NAME --sdk_container_image=IMAGE'

Needs `pip install apache-beam`, and in the image of the workers the files of plain T5.
"""

import shlex
from dataclasses import dataclass

import apache_beam
from apache_beam.options.pipeline_options import PipelineOptions

import configs
from extras import pretokenize


@dataclass(frozen=True)
class Options(pretokenize.Options):
    # Flags of Apache Beam.
    beam: str = "--runner=DirectRunner"


def main():
    options = configs.parse(Options)
    count = len(pretokenize.open_files(options)[1])
    with apache_beam.Pipeline(
        options=PipelineOptions(shlex.split(options.beam))
    ) as pipeline:
        numbers = pipeline | apache_beam.Create(range(count)) | apache_beam.Reshuffle()
        _ = numbers | apache_beam.Map(pretokenize.tokenize_file, options)


if __name__ == "__main__":
    main()
