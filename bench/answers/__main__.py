"""`make answers`: what each chat template makes of answers, for docs/models.md.

Every message is written by every template, and read here and by llama-server's parser. Needs the
build of llama-server, and no model.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from tests.backends.llama.test_template_forms import templates
from tests.sessions.answers.written_answers import WrittenAnswers
from tools.build_engine import pinned_version
from tools.get_templates import MISSING

from .compare import compare
from .facts import facts_of
from .llama_parser import running
from .results import Results, Row, save_results


def main() -> None:
    """Measure the chosen templates, and write the results of all."""
    parser = argparse.ArgumentParser(prog="make answers", description=__doc__)
    parser.add_argument("--template", nargs="+", default=[], help="print these only, save nothing")
    chosen = set(parser.parse_args().template)
    if not templates():
        raise SystemExit(MISSING)
    rows = []
    with running() as llama:
        for path in templates():
            if chosen and path.stem not in chosen:
                continue
            answers = WrittenAnswers(path)
            row = Row(asyncio.run(facts_of(answers)), compare(answers, llama))
            rows.append(row)
            print(row.line, flush=True)
            if chosen:
                print(*row.comparison.differences, sep="\n", file=sys.stderr)
    if not chosen:
        save_results(Results(rows, pinned_version()))


if __name__ == "__main__":
    main()
