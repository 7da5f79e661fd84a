"""ServerApp: run config -> strategy -> ``strategy.start(grid)``. Nothing else."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedtta_flwr.server import federation

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one federation to the end of its streams."""
    with federation(context.run_config) as strategy:
        strategy.start(grid)
