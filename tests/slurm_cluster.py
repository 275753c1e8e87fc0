"""A Slurm of two nodes on this machine: own key, loopback ports, state in one folder."""

import getpass
import os
import socket
import subprocess
import time
from pathlib import Path

PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"])

_CONF = """
ClusterName=h3lib
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={controller}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldParameters=enable_configless
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2
KillWait=2
MaxArraySize=100
{nodes}
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Started by `with`; at its end every process that it started is stopped."""

    def __init__(self, folder: Path):
        self.folder, self.processes = folder, []
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SLURM")},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": PATH,
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> "Cluster":
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir()
        controller, *ports = _free_ports(3)
        nodes = "\n".join(
            f"NodeName=n{i} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} "
            "CPUs=4 RealMemory=1000 State=UNKNOWN"
            for i, port in enumerate(ports, 1)
        )
        (self.folder / "slurm.conf").write_text(
            _CONF.format(
                folder=self.folder, user=getpass.getuser(), controller=controller, nodes=nodes,
                host=socket.gethostname(),
            )
        )  # fmt: skip
        try:
            self._start_munge()
            self._start("slurmctld", "-D", "-c")
            for node in ("n1", "n2"):
                self._start("slurmd", "-D", "-N", node)
            self._wait_for_nodes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def run(self, *command: str, timeout_s: float = 120.0, **settings: str):
        """One command as a user of the cluster."""
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, cwd=self.folder,
            env={**self.environment, **settings},
        )  # fmt: skip

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self.folder.chmod(0o755)  # munged refuses folders that others cannot enter
        places = {"key-file": key, "socket": "munge.socket", "pid-file": "munge.pid"}
        places |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        options = [f"--{name}={self.folder / place}" for name, place in places.items()]
        self._start("munged", "--foreground", "--force", "--num-threads=2", *options)
        _wait(lambda: (self.folder / "munge.socket").exists(), "munged's socket")

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}-{len(self.processes)}.out").open("w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.environment
            )
        self.processes.append(process)

    def _wait_for_nodes(self) -> None:
        def idle() -> bool:
            ended = [p.args[0] for p in self.processes if p.poll() is not None]
            assert not ended, f"{ended} ended: {self.logs()}"
            return self.run("sinfo", "-h", "-o", "%T %D").stdout.split() == ["idle", "2"]

        _wait(idle, "two idle nodes")

    def logs(self) -> str:
        texts = [path.read_text()[-1500:] for path in self.folder.glob("*.out")]
        return "\n".join(texts + [path.read_text()[-1500:] for path in self.folder.glob("*.log")])


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _wait(condition, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.2)
