"""Tables of what layers and networks cost: time, memory and traffic."""

import re
from collections import defaultdict

from report_files import BACKENDS
from report_files import block
from report_files import count
from report_files import File
from report_files import MissingResultError
from report_files import Results
from report_files import run
from report_files import short
from report_files import versioned
from timing import HUGE_PAGES

# What the keys in the files of traffic.py and step_time.py stand for.
FAMILIES = {
    "conv2d": "`Conv2D` 3 x 3",
    "sasa": "SASA 5 x 5",
    "asc": "ASC 5 x 5",
    "simple_asc": "Simple ASC 5 x 5",
    "acmix": "ACmix 7 x 7",
    "acmix_patchwise": "patchwise ACmix 7 x 7",
    "acmix_window": "ACmix in windows of 8 x 8",
    "acmix_reduction": "ACmix with spatial reduction by 4",
    "lifting_conv_p4": "lifting convolution 3 x 3, p4",
    "group_conv_p4": "group convolution 3 x 3, p4",
    "asc_p4": "ASC 5 x 5, p4",
    "acmix_p4": "ACmix 7 x 7, p4",
    "full_attention_p4": "full attention 3 x 3, p4",
    "channel_attention_p4": "channel attention 3 x 3, p4",
    "spatial_attention_p4": "spatial attention 3 x 3, p4",
    "input_attention_p4": "input attention 7 x 7, p4",
    "gsa_p4": "group self-attention 5 x 5, p4",
    "gsa_global_p4": "the same, whole image of 7 x 7",
    "group_dense_p4m": "linear map, 384 values, p4m",
    "multi_head_p4m": "multi-head attention, 384 values, 8 x 8, p4m",
}
STEP_TIMES = {
    "tensorflow": "TensorFlow",
    "jax": "JAX",
    "torch": "PyTorch",
    "torch-eager": "PyTorch, eager",
}
# Images of the later stages of a ResNet: size and channels.
STAGES = ((14, 256), (7, 512))
TRAFFIC = {
    "torch-float32": "PyTorch, operator by operator",
    "torch-mixed_bfloat16": "the same in bfloat16, bytes",
    "torch-inductor-float32": "PyTorch, Inductor",
    "jax-float32": "JAX, XLA",
    "tensorflow-float32": "TensorFlow, XLA",
}


# What is measured on a GPU: backends and dtype policies.
GPU = (("jax", "float32"), ("torch", "float32"), ("torch", "mixed_bfloat16"))


def step_time(results: Results) -> str:
    found = step_times(results)
    if not found:
        command = run("step_time.py", "jax")
        return f"Nothing is measured yet. `{command}` makes the first file."
    files = list(found.values())
    rows = [
        [label, *_ratios(files, name)]
        for name, label in FAMILIES.items()
        if any(name in file for file in files)
    ]
    header = ("layer", *(STEP_TIMES[how] for how in found))
    commands = [
        run("step_time.py" + " --eager" * ("eager" in how), how.split("-")[0])
        for how in found
    ]
    return block(header, rows, files, *commands)


def step_times(results: Results) -> dict[str, File]:
    """The newest file of each backend that has one, at batch 128."""
    found = {}
    for how in STEP_TIMES:
        try:
            found[how] = results.latest(f"step_time-{how}-128", "")
        except MissingResultError:
            continue
    return found


def step_time_stages(results: Results) -> str:
    """Steps on the images of later stages, over that of a convolution."""
    rows, files, commands = [], [], []
    for size, width in STAGES:
        command = f"step_time.py --size {size} --width {width} --repeats 3"
        columns = [
            results.latest(
                f"step_time-{how}-{size}x{width}-128",
                run(command, how.split("-")[0]),
            )
            for how in STEP_TIMES
        ]
        rows += [
            [label, f"{size} x {size} x {width}", *_ratios(columns, name)]
            for name, label in FAMILIES.items()
            if name in columns[0]
        ]
        files += columns
        commands += [run(command), run(command + " --eager", "torch")]
    header = ("layer", "image", *STEP_TIMES.values())
    return block(header, rows, files, *commands)


def _ratios(files: list[File], name: str) -> list[str]:
    """The time of steps of a family, over a convolution's and in seconds."""
    return [
        f"{short(file[name]['ratio'])} ({file[name]['seconds']:.2f} s)"
        if name in file
        else ""
        for file in files
    ]


def step_time_gpu(results: Results) -> str:
    """Steps on a GPU over that of a convolution, and the kernels of a step."""
    files = {
        (backend, dtype): results.latest(
            f"step_time-{backend}-gpu-{dtype}-128",
            run(f"step_time.py --dtype {dtype}", backend),
        )
        for backend, dtype in GPU
    }
    rows = [
        [
            label,
            *(
                f"{short(file[name]['ratio'])} "
                f"({1000 * file[name]['seconds']:.1f} ms, "
                f"{file[name]['kernels']})"
                if name in file
                else ""
                for file in files.values()
            ),
        ]
        for name, label in FAMILIES.items()
        if any(name in file for file in files.values())
    ]
    header = [
        "layer",
        *(
            f"{BACKENDS[backend]}, {dtype.removeprefix('mixed_')}"
            for backend, dtype in GPU
        ),
    ]
    commands = [
        run(f"step_time.py --repeats 7 --dtype {dtype}", backend)
        for backend, dtype in GPU
    ]
    return block(header, rows, list(files.values()), *commands)


def linear_maps_gpu(results: Results) -> str:
    """Linear maps and vision transformers on a GPU, in both bases."""
    map_file = results.latest(
        "pointwise-torch-gpu", run("pointwise.py", "torch")
    )
    networks = {
        backend: results.latest(f"vit-{backend}-gpu", run("vit.py", backend))
        for backend in ("jax", "torch")
    }
    rows = [
        [
            versioned("torch", map_file),
            f"linear map, {row['width']} values, {row['group']}, "
            f"{row['basis']}",
            f"{1000 * row['seconds_median']:.1f} ms",
            f"{row['ratio_of_medians']:.2f}",
        ]
        for row in map_file["rows"]
    ]
    rows += [
        [
            versioned(backend, file),
            f"vision transformer, {row['network']}",
            f"{1000 * row['seconds_median']:.1f} ms",
            f"{1 / row['times_faster']:.2f}",
        ]
        for backend, file in networks.items()
        for row in file["rows"]
        if row["network"] != "plain"
    ]
    header = ("backend", "what", "step", "over the plain one")
    return block(
        header,
        rows,
        [map_file, *networks.values()],
        run("pointwise.py --widths 512", "torch"),
        *(run("vit.py", backend) for backend in networks),
    )


def with_another_run(
    results: Results, kind: str, place: str, command: str
) -> dict[str, File]:
    """The files of all backends, and one of JAX in other surroundings.

    Args:
        kind: the name of the benchmark, with which its files begin.
        place: what `timing.place` calls the surroundings.
        command: what makes the file of JAX there.

    Returns:
        The files by backend and version; the last one also names the place.
    """
    of_backends = results.by_backend(f"{kind}-{{}}", run(f"{kind}.py"))
    files = {
        versioned(backend, file): file for backend, file in of_backends.items()
    }
    other = results.latest(f"{kind}-jax-{place}", command)
    files[f"{versioned('jax', other)}, {place.replace('_', ' ')}"] = other
    return files


def group_conv(results: Results) -> str:
    """Steps of group convolutions over that of a plain one."""
    on_one_core = (
        "KERAS_BACKEND=jax taskset -c 0 python benchmarks/group_conv.py"
    )
    files = with_another_run(results, "group_conv", "one_core", on_one_core)
    rows = [
        [
            where,
            f"{1000 * file['seconds_median']['Conv2D']:.0f}",
            group,
            f"{1000 * file['seconds_median'][group]:.0f}",
            f"{ratio:.2f}",
        ]
        for where, file in files.items()
        for group, ratio in file["ratio_of_medians"].items()
    ]
    header = ("backend", "`Conv2D`, ms", "group", "`GroupConv2D`, ms", "ratio")
    return block(
        header, rows, list(files.values()), run("group_conv.py"), on_one_core
    )


def pointwise(results: Results) -> str:
    """Steps of linear maps in both bases over that of a dense layer."""
    files = results.by_backend("pointwise-{}", run("pointwise.py"))
    of_any = next(iter(files.values()))["rows"]
    names = list(dict.fromkeys(row["group"] for row in of_any))
    rows = []
    for backend, file in files.items():
        ratios: dict[int, dict[tuple, float]] = defaultdict(dict)
        for row in file["rows"]:
            key = row["group"], row["basis"]
            ratios[row["width"]][key] = row["ratio_of_medians"]
        rows += [
            [
                versioned(backend, file),
                count(width),
                *(
                    f"{found[name, 'irreps']:.2f} "
                    f"({found[name, 'regular']:.2f})"
                    for name in names
                ),
            ]
            for width, found in sorted(ratios.items())
        ]
    header = ("backend", "values per pixel", *names)
    return block(header, rows, list(files.values()), run("pointwise.py"))


def pointwise_parts(results: Results) -> str:
    """What a training step by blocks consists of, in dense products."""
    files = results.by_backend(
        "pointwise_parts-{}", run("pointwise.py --parts")
    )
    rows = []
    for backend, file in files.items():
        found: dict[str, list[str]] = {}
        totals: dict[str, float] = defaultdict(float)
        for row in file["rows"]:
            cost = row["times_in_a_step"] * row["over_a_dense_product"]
            totals[row["group"]] += cost
            found.setdefault(row["group"], []).append(
                f"{row['times_in_a_step']} x {row['over_a_dense_product']:.2f}"
            )
        rows += [
            [
                versioned(backend, file),
                group,
                *cells,
                f"{totals[group] / 3:.2f}",
            ]
            for group, cells in found.items()
        ]
    of_any = next(iter(files.values()))["rows"]
    names = dict.fromkeys(row["part"] for row in of_any)
    return block(
        ("backend", "group", *names, "sum, over three dense products"),
        rows,
        list(files.values()),
        run("pointwise.py --parts"),
    )


def vit(results: Results) -> str:
    """Steps of vision transformers beside that of a plain one."""
    in_huge_pages = f"GLIBC_TUNABLES={HUGE_PAGES} {run('vit.py', 'jax')}"
    files = with_another_run(results, "vit", "huge_pages", in_huge_pages)
    rows = [
        [
            where,
            row["network"],
            count(row["parameters"]),
            f"{row['seconds_median']:.2f} s",
            f"{row['times_faster']:.2f}",
        ]
        for where, file in files.items()
        for row in file["rows"]
    ]
    header = ("backend", "network", "parameters", "step", "times faster")
    return block(
        header, rows, list(files.values()), run("vit.py"), in_huge_pages
    )


def equally_wide(results: Results) -> str:
    """Steps of ResNet29 on p4 beside that of an equally wide planar one."""
    files = results.by_backend("resnet29-{}", run("resnet29.py"))
    rows = [
        [
            versioned(backend, file),
            {"conv": "convolution", "asc": "ASC"}[row["mixer"]],
            *(count(row["parameters"][group]) for group in ("z2", "p4")),
            *(
                f"{row['seconds_median'][group]:.2f} s"
                for group in ("z2", "p4")
            ),
            f"{row['ratio_of_medians']:.2f}",
            f"{row['ratio_of_medians_with_more_blocks']:.2f}",
        ]
        for backend, file in files.items()
        for row in file["rows"]
    ]
    header = ("backend", "mixer", "parameters, planar", "parameters, p4")
    header += ("step, planar", "step, p4", "ratio")
    header += ("more blocks, over p4",)
    return block(header, rows, list(files.values()), run("resnet29.py"))


def attentive_time(results: Results) -> str:
    command = run("attentive_conv.py time")
    files = results.by_backend("attentive_conv-time-{}", command)
    forms = ("input", "co", "channel", "spatial", "full")
    forms += ("full held", "full naive")
    rows = [
        [
            versioned(backend, file),
            f"{file['seconds_median']['None']:.2f}",
            *(short(file["ratio"][form]) for form in forms),
        ]
        for backend, file in files.items()
    ]
    header = (
        "backend",
        "plain, s",
        *(form.replace(" ", ", ") for form in forms),
    )
    return block(header, rows, list(files.values()), command)


def windows_time(results: Results) -> str:
    command = run("windows.py time")
    files = results.by_backend("windows-time-{}", command)
    forms = [
        f"{kind} {form}"
        for kind in ("sasa", "asc")
        for form in ("5 x 5", "7 x 7", "5 x 5, unfold")
    ]
    rows = [
        [
            versioned(backend, file),
            f"{1000 * file['seconds_median']['Conv2D']:.1f}",
            *(short(file["ratio"][form]) for form in forms),
        ]
        for backend, file in files.items()
    ]
    names = [re.sub("^[a-z]+", lambda m: m.group().upper(), f) for f in forms]
    header = ("backend", "`Conv2D`, ms", *names)
    return block(header, rows, list(files.values()), command)


def acmix_time(results: Results) -> str:
    command = run("acmix.py time --repeats 15")
    files = results.by_backend("acmix-time-{}", command)
    rows = []
    for backend, file in files.items():
        ratios = [size["ratio"] for size in file["sizes"].values()]
        ours = [ratio["ACmix2D"] for ratio in ratios]
        unfold = [ratio["unfold_dense"] for ratio in ratios]
        rows.append([versioned(backend, file), *map(short, ours + unfold)])
    sizes = list(next(iter(files.values()))["sizes"])
    header = ["backend", *sizes, *(f"unfold, {size}" for size in sizes)]
    return block(header, rows, list(files.values()), command)


def gsa_time(results: Results) -> str:
    command = run("group_self_attention.py time")
    files = results.by_backend("group_self_attention-time-{}", command)
    rows = [
        [
            versioned(backend, file),
            f"{file['seconds']['ours']:.2f}",
            f"{file['seconds']['cubic']:.2f}",
            f"{file['cubic / ours']:.2f}",
        ]
        for backend, file in files.items()
    ]
    header = ("backend", "ours, s", "cubic, s", "cubic over ours")
    return block(header, rows, list(files.values()), command)


def attentive_memory_file(results: Results) -> File:
    """Temporaries of attentive networks, in GiB."""
    command = run("attentive_conv.py memory", "jax")
    return results.latest("attentive_conv-memory-jax", command)


def attentive_memory(results: Results) -> str:
    file = attentive_memory_file(results)
    rows = []
    for name, sizes in file["gib"].items():
        network, attention = name.split()
        forms = [short(sizes.get(f)) for f in ("chunked", "held", "naive")]
        rows.append([network, attention.replace("None", "none"), *forms])
    header = ("network", "attention", "chunked, GiB", "held, GiB", "naive, GiB")
    return block(header, rows, [file], run("attentive_conv.py memory", "jax"))


def attentive_rss(results: Results) -> str:
    command = run("attentive_conv.py rss")
    files = results.by_backend("attentive_conv-rss-{}", command)
    rows = [
        [versioned(backend, file), *map(count, file["mib"].values())]
        for backend, file in files.items()
    ]
    header = ("backend", "chunked, MiB", "held, MiB", "naive, MiB")
    return block(header, rows, list(files.values()), command)


def windows_memory(results: Results) -> str:
    command = run("windows.py memory", "jax")
    file = results.latest("windows-memory-jax", command)
    rows = [
        [
            f"{kind.upper()} 5 x 5",
            *(f"{sizes[form]:.1f}" for form in ("ours", "unfold")),
            f"{sizes['ours / unfold']:.2f}",
        ]
        for kind, sizes in file["mib"].items()
    ]
    header = ("layer", "ours, MiB", "unfold, MiB", "ratio")
    return block(header, rows, [file], command)


def acmix_memory(results: Results) -> str:
    command = run("acmix.py memory", "jax")
    file = results.latest("acmix-memory-jax", command)
    rows = [
        [
            size,
            *(f"{sizes[form]:.1f}" for form in ("ACmix2D", "unfold", "Conv2D")),
            f"{sizes['ACmix2D / unfold']:.2f}",
        ]
        for size, sizes in file["mib"].items()
    ]
    header = ("size", "ours, MiB", "unfold, MiB", "`Conv2D`, MiB", "ratio")
    return block(header, rows, [file], command)


def gsa_memory(results: Results) -> str:
    command = run("group_self_attention.py memory", "jax")
    file = results.latest("group_self_attention-memory-jax", command)
    sizes: dict[tuple, dict[str, float]] = defaultdict(dict)
    for row in file["rows"]:
        case = (row["group"], row["kernel_size"], row["batch"])
        sizes[case][row["form"]] = row["gib"]
    rows = [
        [
            group,
            f"{size} x {size}" if size else "whole image",
            str(batch),
            *(count(forms.get(form), 3) for form in ("ours", "cubic")),
        ]
        for (group, size, batch), forms in sizes.items()
    ]
    header = ("group", "window", "batch", "ours, GiB", "cubic, GiB")
    return block(header, rows, [file], command)


def traffic_files(results: Results) -> dict[str, File]:
    """The newest file of each column of the table."""
    command = run("traffic.py", "<backend>")
    return {how: results.latest(f"traffic-{how}-8", command) for how in TRAFFIC}


def traffic(results: Results) -> str:
    files = traffic_files(results)
    rows = []
    for name, label in FAMILIES.items():
        cells = [label]
        for how, file in files.items():
            if name not in file:
                cells.append("")
            elif "bfloat16" in how:  # each in units of its own input
                single = files[how.replace("mixed_bfloat16", "float32")]
                moved = file[name]["moved"] / single[name]["moved"]
                cells.append(f"{moved / 2:.2f}")
            else:
                moved, kernels = file[name]["moved"], file[name]["kernels"]
                cells.append(f"{moved:,.0f} ({kernels:,})")
        rows.append(cells)
    return block(
        ("layer", *TRAFFIC.values()),
        rows,
        list(files.values()),
        run("traffic.py"),
        run("traffic.py --dtype mixed_bfloat16", "torch"),
        run("traffic.py --compiled", "torch"),
    )


def window_forms(results: Results) -> str:
    command = run("window_forms.py", "torch")
    file = results.latest("window_forms-torch-128", command)
    forms = ("tiles", "products", "views")
    rows = [
        [
            label,
            *(
                f"{found[form]['seconds']:.2f} ({found[form]['moved']:,.0f})"
                if form in found
                else ""
                for form in forms
            ),
        ]
        for name, label in FAMILIES.items()
        if (found := file.get(name))
    ]
    header = ("layer", *(f"`{form}`" for form in forms))
    return block(header, rows, [file], command)


def import_time(results: Results) -> str:
    command = "python benchmarks/import_time.py"
    file = results.latest("import_time", command)
    rows = [
        [
            STEP_TIMES[backend],
            f"{file[backend]['keras']:.2f}",
            f"{file[backend]['keras_equiattn']:.2f}",
        ]
        for backend in ("tensorflow", "jax", "torch")
    ]
    header = ("backend", "Keras with the backend, s", "the package adds, s")
    return block(header, rows, [file], command)


TABLES = (
    acmix_memory,
    acmix_time,
    attentive_memory,
    attentive_rss,
    attentive_time,
    group_conv,
    equally_wide,
    gsa_memory,
    gsa_time,
    import_time,
    pointwise,
    pointwise_parts,
    step_time,
    step_time_gpu,
    step_time_stages,
    linear_maps_gpu,
    traffic,
    vit,
    window_forms,
    windows_memory,
    windows_time,
)
