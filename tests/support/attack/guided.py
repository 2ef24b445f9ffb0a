"""Coverage-guided: `python tests/support/attack/guided.py KIND [FOLDER ...] [-max_total_time=60 ...]`.

KIND is gguf, safetensors or statistics. atheris (`pip install atheris`) changes files so that they run lines of the
readers that no file before them has run; words with a dash are libFuzzer's. It ends at the first file that raises
what is no error of ours, and leaves that file. FOLDER, `corpus/KIND` beside this script by default, gets the files that
reached new lines; the small ones of a run are kept there, and `make test` reads them.
"""

from __future__ import annotations

import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))
CORPUS = Path(__file__).with_name("corpus")
LONGEST = 6000  # bytes
SUFFIXES = {"gguf": ".gguf", "safetensors": ".safetensors", "statistics": ".safetensors"}


def attempt(kind: str) -> Callable[[Path], object]:
    """What is done with a file of this kind."""
    from attack.cases import read_all
    from attack.mutated_files import use_statistics

    return use_statistics if kind == "statistics" else read_all


def seeds(kind: str) -> list[bytes]:
    """Whole files, to begin with. GGUF files are cut, as libFuzzer would do it: their headers count."""
    from attack.gguf_files import collection, model
    from attack.mutated_files import whole

    if kind == "gguf":
        return [make(random.Random(seed)).bytes()[:LONGEST] for seed in range(4) for make in (collection, model)]
    own = {name: files[changing] for name, (files, changing, _) in whole().items() if changing.endswith(".safetensors")}
    return [content for name, content in own.items() if name.startswith("statistics") == (kind == "statistics")]


def main() -> None:
    import atheris

    kind, *rest = sys.argv[1:]
    # The finder of an editable installation comes last: what it loads, atheris does not see.
    sys.path.insert(0, str(TESTS.parent))
    sys.meta_path.sort(key=lambda finder: type(finder).__name__.startswith("ScikitBuild"))
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="guided-", dir=memory) as scratch:
        path = Path(scratch, "file" + SUFFIXES[kind])
        with atheris.instrument_imports(include=["billfish.checkpoints", "billfish.statistics", "billfish.core"]):
            import billfish as bf

            use = attempt(kind)

            def one(content: bytes) -> None:
                path.write_bytes(content)
                try:
                    use(path)
                except bf.BillfishError:
                    pass
                finally:
                    for left in path.parent.iterdir():
                        left.unlink()

            for content in seeds(kind):  # now, as most modules are imported when they are first used
                one(content)
        warnings.filterwarnings("error", ".* encountered in cast")
        if all(word.startswith("-") for word in rest):
            rest.append(str(CORPUS / kind))
        for folder in (Path(word) for word in rest if not word.startswith("-")):
            folder.mkdir(parents=True, exist_ok=True)
            if not any(folder.iterdir()):
                for number, content in enumerate(seeds(kind)):
                    (folder / f"seed{number}").write_bytes(content)
        atheris.Setup([sys.argv[0], f"-max_len={LONGEST}", "-timeout=5", "-rss_limit_mb=2000", *rest], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
