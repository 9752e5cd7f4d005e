"""Test a network that `main_train_vrt.py` has trained, on one process or on several ranks, which share the clips.

    python main_test_vrt.py --opt options/vrt/006_train_vrt_videodeblurring_gopro_rgbspike.json
    torchrun --nproc_per_node=2 main_test_vrt.py --opt options/vrt/006_train_vrt_videodeblurring_gopro_rgbspike.json
    python main_test_vrt.py --opt options/vrt/006_train_vrt_videodeblurring_gopro.json datasets.test.dataroot_lq=mine

It loads the newest checkpoint of the task, else `path.pretrained_netE` or `path.pretrained_netG`, and prefers E to G.
It prints PSNR and SSIM beside those of the blurred frames and of detail injection, which needs no training, and writes
pictures, blurred | restored | sharp, to `images/<clip>/`. Without sharp frames, as in the last line, it writes every
restored frame there: `mine/<clip>/<frame>.png` becomes `images/<clip>/<frame>_<iter>.png`.
"""

from __future__ import annotations

import logging

from deblurring.checkpoints import find_newest, fit, load_weights
from deblurring.networks import make_network
from deblurring.options import Options
from deblurring.running import open_folder, run
from deblurring.testing import find_test_clips, tell, test
from shared.program import UserError

import ddpkit

log = logging.getLogger("test")


def main(opt: Options, job: ddpkit.Context) -> None:
    clips = find_test_clips(opt)
    folder = open_folder(opt)
    net = make_network(opt).to(job.device)
    found = find_newest(folder / "models")
    average, pretrained = opt["path"]["pretrained_netE"], opt["path"]["pretrained_netG"]
    if found:
        step, letter = found.saved["step"], max(found.weights, key="GE".index)
        fit(net, found.weights[letter], source := found.path.with_name(f"{step}_{letter}.pth"))
    elif average or pretrained:
        step, source = 0, average or pretrained
        load_weights(net, source, strict=opt["train"][f"{'E' if average else 'G'}_param_strict"], average=bool(average))
    else:
        raise UserError(
            f"there are no checkpoints in {folder / 'models'} and no path.pretrained_netG: train first, with "
            "main_train_vrt.py and the same options"
        )
    log.info("testing %s on %d clips with %d process(es)", source, len(clips), job.world_size)
    report = test(net, clips, opt, job.device, folder / "images", f"{step}")
    tell(report, folder, step)


if __name__ == "__main__":
    run(main, __doc__)
