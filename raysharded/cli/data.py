"""`raysharded data`: create token stores and token files from text, convert, arrange and inspect them."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from raysharded.cli.errors import AsJson, print_json
from raysharded.cli.output import console, echo
from raysharded.cli.usage import App

if TYPE_CHECKING:
    from collections.abc import Callable

    from raysharded.data.store.progress import PackProgress
    from raysharded.data.text.part_tokens import Encoders, Reading
    from raysharded.report.data_audit import DataAudit
    from raysharded.report.read_samples import SamplesRead

app = App(help="Create token stores from text, and inspect them.")
_LISTED_IDS = 8
"""Ids of samples that a line shows."""


class Format(StrEnum):
    """Format of an input file."""

    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"


class Layout(StrEnum):
    """Layout of packed tokens."""

    STORE = "store"
    PARQUET = "parquet"


class Compression(StrEnum):
    """Compression of Parquet files."""

    ZSTD = "zstd"
    NONE = "none"


@app.command()
def pack(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT", help="Files, folders or globs; local paths or URLs.")],
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="A folder without packed data, or its URL.")],
    input_format: Annotated[
        Format | None, typer.Option("--format", help="By default from each file's suffix.", case_sensitive=False)
    ] = None,
    text_field: Annotated[str, typer.Option(help="The field of JSON Lines, or column of Parquet, with the text.")] = (
        "text"
    ),
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="A `tokenizer.json`, a folder with one, or a name of the Hub. By default bytes."
        ),
    ] = None,
    end_of_document: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="The tokenizer's token that ends a document, if unusual.")
    ] = None,
    tokens_per_file: Annotated[int, typer.Option(min=1, help="The last file has the rest.")] = 1 << 26,
    tokens_per_row_group: Annotated[int, typer.Option(min=1, help="The unit of reads, of Parquet files.")] = 1 << 16,
    compression: Annotated[Compression, typer.Option(help="Of Parquet files.")] = Compression.ZSTD,
    layout: Annotated[Layout, typer.Option(help="A token store, or Parquet files that other tools read, too.")] = (
        Layout.STORE
    ),
    workers: Annotated[int, typer.Option(min=1, help="Processes that read and tokenize.")] = 1,
    on_ray: Annotated[
        bool, typer.Option("--ray", help="Read and tokenize on the Ray cluster that this machine belongs to.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Pack text, JSON Lines or Parquet text columns for TokenDataset."""
    from dataclasses import asdict

    from raysharded.data.pack import pack as pack_files
    from raysharded.display.quantities import count, size

    packed = pack_files(
        inputs,
        output,
        input_format=None if input_format is None else input_format.value,
        text_field=text_field,
        tokenizer=tokenizer,
        end_of_document=end_of_document,
        tokens_per_file=tokens_per_file,
        tokens_per_row_group=tokens_per_row_group,
        compression=compression.value,
        layout=layout.value,
        workers=workers,
        encoders=_ray_tasks() if on_ray else None,
        on_progress=_show_progress,
    )
    if as_json:
        print_json({"output": output, **asdict(packed)})
        return
    if packed.skipped:
        names = ", ".join(packed.skipped[:3]) + (", ..." if len(packed.skipped) > 3 else "")
        echo(f"left out: {count(len(packed.skipped), 'hidden file')} ({names})", err=True)
    echo(
        f"{output}: {count(packed.tokens, 'token')} of {count(packed.documents, 'document')} in "
        f"{count(packed.files, 'file')}, {size(packed.bytes)}"
    )


def _ray_tasks() -> Callable[[Reading], Encoders]:
    from raysharded.ray_backend.packing.ray_tasks import RayTasks

    return RayTasks


def _show_progress(found: PackProgress) -> None:
    from raysharded.display.quantities import count

    rate = f"{found.tokens_per_s:,.0f} per second, {found.share:.0%} of the input"
    echo(f"{count(found.shards, 'shard')}, {count(found.tokens, 'token')}, {rate}", err=True)


@app.command()
def convert(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT", help="Token files, folders or globs; paths or URLs.")],
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="A folder without packed data, or its URL.")],
    tokens_per_file: Annotated[int, typer.Option(min=1, help="Tokens per shard; the last one has the rest.")] = 1 << 26,
    as_json: AsJson = False,
) -> None:
    """Convert token files to a token store with the same stream of tokens."""
    from dataclasses import asdict

    from raysharded.data.convert import convert as convert_files
    from raysharded.display.quantities import count, size

    done = convert_files(inputs, output, tokens_per_file=tokens_per_file)
    if as_json:
        print_json({"output": output, **asdict(done)})
        return
    echo(f"{output}: {count(done.tokens, 'token')} in {count(done.files, 'shard')}, {size(done.bytes)}")


@app.command()
def arrange(
    store: Annotated[str, typer.Argument(metavar="STORE", help="The folder of a token store, or its URL.")],
    seq_len: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens per sample.")],
    end_of_document: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=0, help="The token that ends documents, if the store has none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan the packing of a store's documents into samples, for PackedDataset. The plan is written beside the store."""
    from dataclasses import asdict

    from raysharded.data.packed.arrange import arrange as arrange_store
    from raysharded.display.quantities import count

    facts = arrange_store(store, seq_len=seq_len, end_of_document=end_of_document)
    if as_json:
        print_json({"store": store, **asdict(facts), "padding": facts.padding})
        return
    echo(
        f"{store}: {count(facts.num_documents, 'document')} in {count(facts.num_samples, 'sample')} of {seq_len} "
        f"tokens, with {count(facts.num_cuts, 'cut')}; {100 * facts.padding:.2f} % of the places are padding"
    )


@app.command()
def audit(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's folder or URL.")],
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="List the samples of each source that these steps have read.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run has read of each source, beside what its weights want, and what it has skipped.

    Exits with 1 if the journal does not prove that every sample was read once.
    """
    from dataclasses import asdict

    from raysharded.report.data_audit import audit as audit_run

    found = audit_run(run)
    listed = None if steps is None else _samples_of(run, steps)
    if as_json:
        of_steps = {} if listed is None else {"steps": steps, "samples_read": [asdict(one) for one in listed]}
        print_json({"run": run, "ok": found.ok, **asdict(found), **of_steps})
    elif listed is not None:
        _print_samples(listed)
    else:
        _print_audit(found)
    if not found.ok:
        raise typer.Exit(1)


def _samples_of(run: str, steps: str) -> tuple[SamplesRead, ...]:
    from raysharded.errors import ConfigError
    from raysharded.report.read_samples import samples_read

    found = re.fullmatch(r"(\d+)(?::(\d+))?", steps)
    if found is None:
        raise ConfigError(f"--steps {steps}: give the first and the last step, as in 100:120.")
    return samples_read(run, int(found[1]), int(found[2] or found[1]))


def _print_samples(found: tuple[SamplesRead, ...]) -> None:
    from raysharded.display.quantities import count

    for source in found:
        echo(f"{source.name}: {count(source.samples, 'sample')}")
        for part in source.ranges:
            epoch = "" if part.epoch is None else f" of epoch {part.epoch}"
            ids = ", ".join(map(str, part.ids[:_LISTED_IDS])) + (", ..." if len(part.ids) > _LISTED_IDS else "")
            shown = f": {ids}" if ids else ""
            last = part.first + part.samples - 1
            echo(f"  places {part.first} to {last}{epoch}, in steps {part.first_step} to {part.last_step}{shown}")


def _print_audit(found: DataAudit) -> None:
    from raysharded.display.quantities import count
    from raysharded.report.history.row_table import RowTable

    table = RowTable()
    table.add_column("source", long="shorten")
    ranks = {"read": 0, "wanted": 1, "skipped": 4, "epochs": 2, "of samples": 3}
    if any(one.unproven for one in found.sources):
        ranks["unproven"] = 1
    if any(one.tokens is not None for one in found.sources):
        ranks |= {"tokens": 5, "wanted tokens": 6}
    for name, rank in ranks.items():
        table.add_column(name, right=True, rank=rank)
    for one in found.sources:
        size = one.num_samples
        of_epochs = ("-", "-") if size is None else (f"{(one.read + one.skipped) / size:.2f}", str(size))
        numbers = [str(one.read), f"{one.wanted:.1f}", str(one.skipped), *of_epochs]
        if "unproven" in ranks:
            numbers.append(str(one.unproven))
        if one.tokens is not None:
            numbers += [str(one.tokens), f"{one.wanted_tokens:.0f}"]
        table.add_row(one.name, *numbers)
    with console() as out:
        out.print(table)
    for source in found.sources:
        for epoch in source.epochs:
            read = f"{count(epoch.samples, 'sample')} in steps {epoch.first_step} to {epoch.last_step}"
            echo(f"{source.name}, epoch {epoch.number}: {read}")
    for passed in found.skipped:
        echo(f"skipped after step {passed.after_step}: {count(passed.samples, 'sample')} ({passed.reason})")
    ledger = found.ledger
    if ledger is None:
        echo("the journal does not have the expected samples")
    else:
        checked = ledger.steps_checked
        first = found.last_step - checked + 1  # a fork's journal begins after its parent's steps
        where = f", from step {first} on" if first > 1 else ""
        samples = found.read // found.last_step * checked
        echo(
            f"{count(samples, 'sample')} in {count(checked, 'step')}{where}: {ledger.samples_lost} missing, "
            f"{ledger.samples_repeated} repeated"
        )


@app.command()
def info(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Token stores; or token files, folders or globs.")],
    seq_len: Annotated[int | None, typer.Option(metavar="N", min=1, help="Also count samples of N tokens.")] = None,
    documents: Annotated[bool, typer.Option("--documents", help="Also count documents. Reads all tokens.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="Shows the beginning of the first document as text.")
    ] = None,
    end_of_document: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=0, help="The token that ends documents, if no store names it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check stores or files, all together as one data set, and show their contents.

    Reads only indexes and footers, unless documents are counted.
    """
    from raysharded.data import TokenDataset
    from raysharded.report.history.tables import facts_table

    dataset = TokenDataset(paths, seq_len=seq_len or 1)
    dataset.validate()
    found = {
        "files": dataset.num_files,
        "tokens": dataset.num_tokens,
        "vocab_size": dataset.vocab_size,
        "tokenizer": dataset.tokenizer,
        **({"seq_len": seq_len, "samples": len(dataset)} if seq_len else {}),
    }
    if documents or tokenizer is not None:
        from dataclasses import asdict

        from raysharded.data.document_lengths import document_lengths

        found |= asdict(document_lengths(paths, tokenizer=tokenizer, end_of_document=end_of_document))
    if as_json:
        print_json(found)
        return
    table = facts_table()
    for name, value in found.items():
        table.add_row(name, str(value))
    with console() as out:
        out.print(table)
    if not documents and tokenizer is None:
        more = (
            ", and a decoded sample"
            if dataset.tokenizer == "bytes"
            else "; with --tokenizer FILE also a decoded sample"
        )
        echo(f"with --documents: number and lengths of documents{more}")
