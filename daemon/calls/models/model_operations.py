"""inferd's own calls on models: list, unload, pin, swap, and change adapters."""

from __future__ import annotations

from ....backends.errors import LoadFailed
from ....ipc import messages as w
from ....ipc.server.connection import Request
from ...core import Daemon
from ...models import model_adapters
from ...models.description import describe_model, show_model
from ...models.model import ManagedModel
from ...models.model_files import files_in_use


async def models(daemon: Daemon, request: Request) -> w.ModelsResult:
    """List the models."""
    registry, catalog = daemon.registry, daemon.registry.catalog
    await catalog.refresh()

    def describe(model: ManagedModel) -> w.ModelInfo:
        facts = registry.file_facts.known_facts(files_in_use(model.config.file))
        return describe_model(registry, model, facts)

    files = catalog.files_not_offered() if request.params.all_files else []
    return w.ModelsResult(
        models=[describe(model) for model in catalog.listed_to(request.owner.user)],
        not_offered=[{"file": one.file, "reason": one.reason} for one in files],
    )


async def show(daemon: Daemon, request: Request) -> w.ModelsResult:
    """Describe one model, with the facts that its file's header states."""
    model = daemon.registry.catalog.get(request.params.name, request.owner.user)
    facts, cause = None, None
    if files := files_in_use(model.config.file):
        try:
            facts = await daemon.registry.file_facts.facts_of(files)
        except LoadFailed as exc:
            cause = exc.message
    return w.ModelsResult(models=[show_model(daemon.registry, model, facts, cause)])


async def unload_model(daemon: Daemon, request: Request) -> w.Empty:
    """Unload a model."""
    p: w.NamesParams = request.params
    await daemon.registry.unload_by_name(p.name, request.owner.user, force=p.force)
    return w.Empty()


async def pin(daemon: Daemon, request: Request) -> w.Empty:
    """Pin a model."""
    daemon.registry.pin_model(request.params.name, request.owner.user, pinned=True)
    return w.Empty()


async def unpin(daemon: Daemon, request: Request) -> w.Empty:
    """Unpin a model."""
    daemon.registry.pin_model(request.params.name, request.owner.user, pinned=False)
    return w.Empty()


async def swap(daemon: Daemon, request: Request) -> w.SwapResult:
    """Replace the model that a name stands for; return once new turns begin on the new model."""
    daemon.check_open()
    p: w.SwapParams = request.params
    catalog = daemon.registry.catalog
    model = catalog.get(p.name, request.owner.user)
    config = catalog.swap_target(model, p.to, request.owner.user)
    to = "" if catalog.names_itself(model, p.to) else p.to
    return await daemon.swaps.swap(model, config, p.mode, to=to, force=p.force)


async def add_adapter(daemon: Daemon, request: Request) -> w.AddAdapterResult:
    """Add an adapter to a model."""
    daemon.check_open()
    p: w.AddAdapterParams = request.params
    model = daemon.registry.catalog.get(p.name, request.owner.user)
    report = await model_adapters.add_adapter(daemon.registry, model, p.adapter, p.file, p.scale)
    if report is None or report.info is None:
        return w.AddAdapterResult()
    return w.AddAdapterResult(loaded=True, id=report.info.id, size_bytes=report.info.size_bytes)


async def remove_adapter(daemon: Daemon, request: Request) -> w.Empty:
    """Remove an adapter from a model."""
    p: w.RemoveAdapterParams = request.params
    model = daemon.registry.catalog.get(p.name, request.owner.user)
    await model_adapters.remove_adapter(daemon.registry, model, p.adapter, force=p.force)
    return w.Empty()
