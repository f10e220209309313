"""Draw a node and its neighbors, and find the node at a position of the picture."""

from __future__ import annotations

from math import cos, pi, sin

import networkx as nx
import numpy as np
from graphs import Explorer, Node
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

SIZE = 560  # pixels
_REACH = 1.25  # of the axes; all nodes are within 1
_COLORS = colormaps["tab10"]


def places(node: Node) -> dict[int, tuple[float, float]]:
    """Return {number: (x, y)}: the chosen node in the middle, its neighbors around it."""
    count = max(1, len(node.neighbors))
    angles = [2 * pi * place / count for place in range(count)]
    around = zip(node.neighbors, angles, strict=False)
    return {node.number: (0.0, 0.0)} | {number: (sin(angle), cos(angle)) for number, angle in around}


def draw(explorer: Explorer, node: Node) -> NDArray[np.uint8]:
    """Return the picture, uint8 [SIZE, SIZE, 3]. Colors are the true classes; lines are edges between the drawn nodes."""
    where = places(node)
    figure = Figure(figsize=(SIZE / 100, SIZE / 100), dpi=100)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    graph = nx.Graph(edges_among(explorer, set(where)))
    graph.add_nodes_from(where)
    order = list(where)
    nx.draw_networkx_edges(graph, where, ax=axes, edge_color="#c8ced4")
    nx.draw_networkx_nodes(
        graph,
        where,
        nodelist=order,
        ax=axes,
        node_color=[_COLORS(int(explorer.data.y[number])) for number in order],
        node_size=[900 if number == node.number else 560 for number in order],
        edgecolors="#222222",
        linewidths=[2.5 if number == node.number else 0 for number in order],
    )
    nx.draw_networkx_labels(graph, where, ax=axes, font_size=8)
    axes.set_xlim(-_REACH, _REACH)
    axes.set_ylim(-_REACH, _REACH)
    axes.set_axis_off()
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()


def edges_among(explorer: Explorer, numbers: set[int]) -> list[tuple[int, int]]:
    """Return the edges with both ends among these nodes."""
    nodes = np.array(sorted(numbers))
    source, target = explorer.data.edge_index.numpy()
    inside = np.isin(source, nodes) & np.isin(target, nodes)
    return list(zip(source[inside].tolist(), target[inside].tolist(), strict=True))


def node_at(node: Node, x: float, y: float) -> int:
    """Return the number of the node nearest to a pixel, which is counted from the upper left corner."""
    right, up = 2 * _REACH * x / SIZE - _REACH, _REACH - 2 * _REACH * y / SIZE
    where = places(node)
    return min(where, key=lambda number: (where[number][0] - right) ** 2 + (where[number][1] - up) ** 2)
