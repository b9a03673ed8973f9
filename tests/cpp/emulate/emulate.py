"""Runs a static program on an emulated Sapphire Rapids, which has AVX-512 and AMX, whatever this machine has.

    python3 tests/cpp/emulate/emulate.py PROGRAM [ARGUMENT...]

Bochs emulates the processor and Debian's kernel runs on it; both come from the suite of Debian named below,
by this machine's own apt, into build/emulate. The first time, Bochs is compiled, which takes some minutes.
Emulation says what instructions compute, and nothing of how fast.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

SUITE = "trixie"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
HERE = Path(__file__).parent
WORK = Path("build/emulate").absolute()
TIMEOUT_S = 3000

CONFIGURE = (
    "--enable-cpu-level=6",
    "--enable-x86-64",
    "--enable-avx",
    "--enable-evex",
    "--enable-amx",
    "--enable-repeat-speedups",
    "--enable-fast-function-calls",
    "--enable-handlers-chaining",
    "--with-nogui",
    "--disable-docbook",
    "--disable-large-ramfile",
)

# What Bochs 3.0 needs to run AMX under Linux and to round as Intel says: file, text, what takes its place.
CHANGES = (
    # Linux keeps AMX's registers only where their use can be forbidden to a process (XFD). Bochs does not say
    # that it can, and ignores what is written into the register for it: permission is asked for, not needed.
    ("cpu/cpuid.cc", "leaf->eax |= (1<<3);", "leaf->eax |= (1<<3) | (1<<4);"),
    # Decoded code is filed under its address, of which bit 7 is inverted once AMX may be used. When code was
    # overwritten, the search for it left out what was filed behind its place, and old code was run.
    ("cpu/icache.h", "if (line_mask > mask) break;", ""),
    # With subnormal numbers flushed, so were differences from 2^-126 to 2^-125, which are normal numbers.
    (
        "cpu/softfloat3e/s_subMagsF32.c",
        "if (!expZ && sigDiff) {",
        "if (!expZ && !(sigDiff << shiftDist & 0x800000)) {",
    ),
)

MACHINE = """
config_interface: textconfig
display_library: nogui
megs: 512
cpu: model=sapphire_rapids, count=1, ips=50000000, reset_on_triple_fault=0, ignore_bad_msrs=1
romimage: file={packages}/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file={packages}/usr/share/vgabios/vgabios.bin
ata0-master: type=cdrom, path={work}/boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={work}/console.txt
log: {work}/bochs.log
panic: action=fatal
error: action=ignore
info: action=ignore
debug: action=ignore
clock: sync=none
"""

# Without ACPI, whose system management mode Bochs 3.0 leaves with an error.
BOOT = """default program
prompt 0
label program
 kernel vmlinuz
 initrd initrd
 append console=ttyS0,115200 loglevel=0 nokaslr acpi=off mitigations=off tsc=reliable no5lvl nopti panic=-1
"""


def skip(reason: str) -> NoReturn:
    """End without an error: the machine can't do this."""
    print(f"emulation of x86: skipped: {reason}")
    sys.exit(0)


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a command to its end and return what it printed."""
    done = subprocess.run(
        command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}")
    return done.stdout


def mirror() -> str:
    """Find where this machine gets its Debian packages."""
    if shutil.which("apt-get") is None or not KEYRING.exists():
        skip("it needs a Debian machine with apt-get")
    targets = run("apt-get", "indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(REPO_URI)")
    for line in targets.splitlines():
        if line.startswith("Debian|Debian|"):
            return line.rpartition("|")[2]
    skip("apt knows no Debian mirror yet: run 'apt-get update'")


def own_apt() -> dict[str, str]:
    """Return the environment for an apt that knows SUITE and leaves this machine's packages alone."""
    apt = WORK / "apt"
    for folder in ("lists/partial", "cache/archives/partial", "state"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    source = f"[signed-by={KEYRING}] {mirror()} {SUITE} main"
    (apt / "sources.list").write_text(f"deb {source}\ndeb-src {source}\n")
    (apt / "status").touch()
    settings = {
        "Dir::Etc::sourcelist": apt / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State": apt / "state",
        "Dir::State::lists": apt / "lists",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "Acquire::Languages": "none",
        "APT::Sandbox::User": "root",
    }
    (apt / "conf").write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    return {**os.environ, "APT_CONFIG": str(apt / "conf")}


def fetch_packages() -> None:
    """Unpack the kernel, the BIOS, the boot loader and what writes a CD into build/emulate/packages."""
    env, downloads = own_apt(), WORK / "downloads"
    shutil.rmtree(downloads, ignore_errors=True)
    downloads.mkdir()
    run("apt-get", "update", env=env)
    depends = run("apt-cache", "depends", "linux-image-cloud-amd64", env=env)
    kernel = re.search(r"Depends: (linux-image-\S+)", depends)
    if kernel is None:
        sys.exit(f"no kernel in: {depends}")
    names = ("bochsbios", "vgabios", "isolinux", "syslinux-common", kernel[1])
    run("apt-get", "download", *names, cwd=downloads, env=env)
    run("apt-get", "source", "--download-only", "--tar-only", "bochs", cwd=downloads, env=env)
    run("apt-get", "download", "genisoimage", cwd=downloads)  # it runs here, so it is this machine's
    for package in downloads.glob("*.deb"):
        run("dpkg-deb", "-x", package, WORK / "packages")


def build_bochs() -> None:
    """Compile Bochs into build/emulate/bochs."""
    source = WORK / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    (archive,) = (WORK / "downloads").glob("bochs_*.orig.tar.*")
    run("tar", "xf", archive, "--strip-components=1", cwd=source)
    for name, old, new in CHANGES:
        text = (source / name).read_text(encoding="latin-1")
        if text.count(old) != 1:
            sys.exit(f"{archive.name} is another Bochs than the one this script knows")
        (source / name).write_text(text.replace(old, new), encoding="latin-1")
    print("Compiling Bochs; this takes some minutes, once.", flush=True)
    run("./configure", *CONFIGURE, "CXXFLAGS=-O2 -fno-strict-aliasing -w", "CFLAGS=-O2 -w", cwd=source)
    run("make", f"-j{os.cpu_count()}", cwd=source)
    (source / "bochs").rename(WORK / "bochs")
    shutil.rmtree(source)


def cpio_entry(name: str, content: bytes, number: int) -> bytes:
    """Return a file as the kernel reads it from its first file system."""
    encoded = name.encode() + b"\0"
    fields = (number, 0o100755, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    return header + bytes(-len(header) % 4) + content + bytes(-len(content) % 4)


def make_disk(program: Path, arguments: list[str]) -> None:
    """Write the CD that the machine boots from."""
    disk, packages = WORK / "disk", WORK / "packages"
    shutil.rmtree(disk, ignore_errors=True)
    disk.mkdir()
    run("gcc", "-O2", "-static", HERE / "init.c", "-o", WORK / "init")
    files = {
        "init": (WORK / "init").read_bytes(),
        "program": program.read_bytes(),
        "arguments": b"".join(argument.encode() + b"\0" for argument in arguments),
        "TRAILER!!!": b"",
    }
    entries = (cpio_entry(name, content, i + 1) for i, (name, content) in enumerate(files.items()))
    (disk / "initrd").write_bytes(b"".join(entries))
    (kernel,) = packages.glob("boot/vmlinuz-*")
    shutil.copy(kernel, disk / "vmlinuz")
    shutil.copy(packages / "usr/lib/ISOLINUX/isolinux.bin", disk)
    shutil.copy(packages / "usr/lib/syslinux/modules/bios/ldlinux.c32", disk)
    (disk / "isolinux.cfg").write_text(BOOT)
    boots = (
        "-b",
        "isolinux.bin",
        "-c",
        "boot.cat",
        "-no-emul-boot",
        "-boot-load-size",
        "4",
        "-boot-info-table",
    )
    run(packages / "usr/bin/genisoimage", "-quiet", "-o", WORK / "boot.iso", *boots, disk)


def boot() -> int:
    """Run the machine, print what the program prints, and return how the program ended."""
    console = WORK / "console.txt"
    console.unlink(missing_ok=True)
    (WORK / "boot.iso.lock").unlink(missing_ok=True)
    (WORK / "machine").write_text(MACHINE.format(work=WORK, packages=WORK / "packages"))
    subprocess.run(
        (WORK / "bochs", "-q", "-f", WORK / "machine"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        check=False,  # being turned off is an error to it
    )
    text = console.read_text(errors="replace") if console.exists() else ""
    print(text, end="")
    end = re.search(r"^emulated: (status|signal) (\d+)\s*$", text, re.MULTILINE)
    if end is None:
        print("The emulated machine ended before the program did.")
        return 1
    return int(end[2]) if end[1] == "status" else 128 + int(end[2])


def main() -> int:
    """Set up what is missing, then run the program."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    WORK.mkdir(parents=True, exist_ok=True)
    if not (WORK / "bochs").exists():
        fetch_packages()
        build_bochs()
    make_disk(Path(sys.argv[1]), sys.argv[2:])
    return boot()


if __name__ == "__main__":
    sys.exit(main())
