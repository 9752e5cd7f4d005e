"""Programs whose output must not depend on whether they are observed: `python unchanged.py NAME`.

Each function without parameters is one of them; it prints what it computes.
"""

import copy
import inspect
import io
import pickle
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._dynamo import utils as dynamo
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

torch.manual_seed(0)


class Net(nn.Module):
    """A network of layers that have parameters, buffers and views."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images."""
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.head(x.view(x.size(0), -1))


net = Net()
x, y = torch.randn(4, 1, 8, 8), torch.randint(0, 3, (4,))
optimizer = SGD(net.parameters(), lr=0.1)


def train(model: Callable[[Tensor], Tensor] = net, images: Tensor = x, steps: int = 3) -> None:
    """Print the loss and the parameters after some steps."""
    net.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), y)
        loss.backward()
        optimizer.step()
    show(loss, *net.parameters())


def show(*tensors: Tensor) -> None:
    """Print the bits of tensors."""
    print(*[tensor.detach().double().sum().item().hex() for tensor in tensors])


def state() -> dict[str, Tensor]:
    """Return the network's parameters, as functions take them."""
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def loss_with(parameters: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
    """Return the loss with other parameters, as a function of these."""
    return cross_entropy(functional_call(net, parameters, (images,)), labels)


def twice(program: Callable[[], None]) -> None:
    """Run it on the evaluated network, before and after some steps."""
    for _ in range(2):
        net.eval()
        program()
        train()


def traced() -> None:
    def program() -> None:
        graph = torch.jit.trace(net, x)
        print(str(graph.graph).count("aten::"))
        show(graph(x))

    twice(program)


def traced_in_training() -> None:
    train()
    show(torch.jit.trace(net, x, check_trace=False)(x))
    train()


def scripted() -> None:
    script = torch.jit.script(net)
    show(script(x))
    train(script)


def scripted_functions() -> None:
    @torch.jit.script
    def noise(rows: Tensor) -> Tensor:
        scale = torch.tensor([2.0, 3.0], dtype=rows.dtype)
        return torch.zeros(2) + torch.rand(2).to(rows.device) * scale + torch.randn_like(rows).mean()

    show(noise(x))


def exported() -> None:
    twice(lambda: print(torch.export.export(net, (x,)).graph))


def traced_symbolically() -> None:
    graph = fx.symbolic_trace(net)
    train(graph)
    print(fx.symbolic_trace(net).code)


def traced_by_proxies() -> None:
    twice(lambda: print(make_fx(net)(x).code))


def traced_with_backward() -> None:
    def gradients(images: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(cross_entropy(net(images), y), list(net.parameters()))

    twice(lambda: print(make_fx(gradients)(x).code))


def fake_tensors() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = Net()(torch.randn(4, 1, 8, 8))
        cross_entropy(logits, torch.randint(0, 3, (4,))).backward()
        print(type(logits).__name__, logits.shape)
    train()


def meta_tensors() -> None:
    logits = Net().to("meta")(x.to("meta"))
    cross_entropy(logits, y.to("meta")).backward()
    print(logits.device, logits.shape)
    train()


def called_with_parameters() -> None:
    show(functional_call(net, state(), (x,)))
    train()


def gradients_of_functions() -> None:
    twice(lambda: show(*grad(loss_with)(state(), x, y).values()))


def gradients_of_samples() -> None:
    def loss_of_sample(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return loss_with(parameters, image[None], label[None])

    twice(lambda: show(*vmap(grad(loss_of_sample), (None, 0, 0))(state(), x, y).values()))


def jacobians() -> None:
    layer = nn.Linear(3, 2)
    show(jacrev(layer)(torch.ones(3)))
    train()
    show(hessian(lambda inputs: layer(inputs).pow(2).sum())(torch.ones(3)))


def products_with_jacobians() -> None:
    show(*jvp(nn.Linear(3, 2), (torch.ones(3),), (torch.ones(3),)))
    train()


def forward_derivatives() -> None:
    layer = nn.Linear(3, 2)
    with forward_ad.dual_level():
        result = layer(forward_ad.make_dual(torch.ones(3), torch.ones(3)))
        show(*forward_ad.unpack_dual(result))
    train()


def counting_hooks() -> None:
    calls: list[str] = []
    hooks = [net.register_forward_hook(lambda *_: calls.append("net"))]
    hooks.append(register_module_forward_hook(lambda module, *_: calls.append(type(module).__name__)))
    train()
    print(calls)
    for hook in hooks:
        hook.remove()
    print(net._forward_hooks)


def backward_hooks() -> None:
    weight = net.conv.weight
    net.head.register_full_backward_hook(lambda module, inputs, outputs: show(*outputs))
    weight.register_hook(lambda gradient: show(gradient))
    weight.register_post_accumulate_grad_hook(lambda parameter: show(parameter.grad))
    train()


def saved_tensors() -> None:
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        train()
    print(sizes)


class Calls(TorchDispatchMode):
    """Lists the convolutions that torch computes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in func.__name__:
            print(func)
        return func(*args, **kwargs or {})


class Functions(TorchFunctionMode):
    """Lists the convolutions that the script computes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "conv" in getattr(func, "__name__", ""):
            print(func.__name__)
        return func(*args, **kwargs or {})


class Images(Tensor):
    """Lists the convolutions of its instances."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "conv" in getattr(func, "__name__", ""):
            print(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def dispatched() -> None:
    with Calls():
        train()


def functions_listed() -> None:
    with Functions():
        train()


def subclassed() -> None:
    train(images=x.as_subclass(Images))
    print(type(net(x.as_subclass(Images))).__name__)


def operations_counted() -> None:
    with FlopCounterMode(display=False) as counter:
        train()
    print(counter.get_total_flops())


def pickled() -> None:
    train()
    text = pickle.dumps(net)
    print(len(text))
    show(pickle.loads(text)(x))
    for each in (net, optimizer):
        file = io.BytesIO()
        torch.save(each.state_dict(), file)
        print(len(file.getvalue()))


def signatures() -> None:
    for function in (net.forward, nn.Module.__call__, cross_entropy, DataLoader.__init__, SGD.step, torch.save):
        print(inspect.signature(function))
    train()


def functions_known_by_name() -> None:
    for function in (cross_entropy, mse_loss, functional.dropout, torch.save):
        print(function.__module__, function.__qualname__, pickle.loads(pickle.dumps(function)) is function)
    train()


def copied() -> None:
    train()
    show(copy.deepcopy(net)(x))
    print(copy.deepcopy(optimizer))
    train()
    print(sorted(vars(net)), sorted(vars(optimizer)))


def loaders_copied() -> None:
    loader = DataLoader(TensorDataset(x, y), 2, shuffle=True, generator=torch.Generator().manual_seed(1))
    for each in (loader, copy.deepcopy(loader)):
        print([labels.tolist() for _, labels in each])
    train()
    print(sorted(vars(loader)))


class Shifted(DataLoader[Any]):
    """A loader with an `__iter__` of its own."""

    def __iter__(self) -> Any:
        for images, labels in super().__iter__():
            yield images + 1, labels


def loaders_subclassed() -> None:
    loader = Shifted(TensorDataset(x, y), 2)
    for images, labels in loader:
        optimizer.zero_grad()
        cross_entropy(net(images), labels).backward()
        optimizer.step()
    iterator = iter(loader)
    print(type(iterator).__name__)
    show(*next(iterator))
    train()


def compiled() -> None:
    model = torch.compile(net, backend="eager")
    train(model)
    show(model(x))
    print(dynamo.counters["graph_break"], dynamo.counters["stats"])


def compiled_as_one_graph() -> None:
    train(torch.compile(net, backend="eager", fullgraph=True))


def recomputed() -> None:
    train(lambda images: checkpoint(net, images, use_reentrant=False))
    train(lambda images: checkpoint(net, images, use_reentrant=True), x.clone().requires_grad_())


def parametrized() -> None:
    for prepare in (lambda: parametrizations.weight_norm(net.head), lambda: parametrizations.spectral_norm(net.conv)):
        prepare()
        optimizer.param_groups[0]["params"] = list(net.parameters())
        train()
    parametrize.remove_parametrizations(net.head, "weight")
    show(net(x))


def pruned() -> None:
    train()
    prune.l1_unstructured(net.head, "weight", amount=0.5)
    optimizer.param_groups[0]["params"] = list(net.parameters())
    train()
    show(net.head.weight.count_nonzero())


def lazy_layers() -> None:
    print(nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d())(torch.randn(3, 7)).shape)
    train()


def random_numbers() -> None:
    random.seed(1)
    np.random.seed(1)
    for _ in range(2):
        print(torch.rand(2).tolist(), random.random(), np.random.rand(), torch.initial_seed())
        train()


def anomalies() -> None:
    root = torch.zeros(1, requires_grad=True)
    warnings.simplefilter("ignore")  # with the stack, in which observers are
    with torch.autograd.set_detect_anomaly(True):
        train()
        try:
            (root.sqrt() * 0).sum().backward()
        except RuntimeError as error:
            print(error)


def graphs() -> None:
    loss = cross_entropy(net(x), y)
    node = loss.grad_fn
    while node:
        print(node.name())
        node = next((after for after, _ in node.next_functions), None)
    train()


def backward_twice() -> None:
    loss = cross_entropy(net(x), y)
    loss.retain_grad()
    loss.backward(retain_graph=True)
    loss.backward()
    show(loss.grad, net.head.bias.grad)
    train()


def warnings_caught() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
        StepLR(SGD(net.parameters(), lr=1.0), 1).step()
    print([str(warning.message) for warning in caught])


def deep_stacks() -> None:
    sys.setrecursionlimit(260)
    train()


def errors() -> None:
    for fail in (lambda: net(torch.randn(4, 2, 8, 8)), lambda: cross_entropy(torch.randn(4, 3), y[:3])):
        try:
            fail()
        except (RuntimeError, ValueError) as error:
            print(type(error).__name__, error)
    train()


def inference() -> None:
    with torch.inference_mode():
        show(net.eval()(x))
    train()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        show(net(x))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
