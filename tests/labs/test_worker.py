import threading
import time

from labkit.labs._worker import LatestWorker
from tests.labs.fake import WAIT_S, wait_until


def test_ten_settings_run_the_first_and_the_last_only():
    """The first is running when nine more arrive: it is cancelled, eight never start, the last one completes."""
    started, release = threading.Event(), threading.Event()
    begun, completed = [], []

    def job(setting, run):
        begun.append(setting)
        started.set()
        while not release.wait(0.005):
            if run.cancelled():
                return
        completed.append(setting)

    worker = LatestWorker(job)
    worker.submit(1)
    assert started.wait(WAIT_S)
    for setting in range(2, 11):
        worker.submit(setting)
    wait_until(lambda: begun[-1] == 10)
    release.set()
    assert worker.wait(WAIT_S)
    assert begun == [1, 10]
    assert completed == [10]


def test_one_thread_at_a_time_and_none_when_idle():
    active, most = [], []

    def job(setting, run):
        active.append(setting)
        most.append(len(active))
        time.sleep(0.002)
        active.remove(setting)

    worker = LatestWorker(job)
    for burst in range(5):
        for setting in range(20):
            worker.submit((burst, setting))
        assert worker.wait(WAIT_S)
        assert not worker.busy
    assert max(most) == 1
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "labkit-lab"])


def test_stop_cancels_what_runs_and_forgets_what_waits():
    started = threading.Event()
    begun = []

    def job(setting, run):
        begun.append(setting)
        started.set()
        while not run.cancelled():
            time.sleep(0.002)

    worker = LatestWorker(job)
    worker.submit("a")
    assert started.wait(WAIT_S)
    worker.submit("b")
    worker.stop()
    assert worker.wait(WAIT_S)
    assert begun in (["a"], ["a", "b"])  # "b" may have begun between the two calls; it must not survive them


def test_a_job_that_raises_is_logged_and_leaves_the_worker_usable(caplog):
    done = []

    def job(setting, run):
        if setting == "bad":
            raise RuntimeError("escaped")
        done.append(setting)

    worker = LatestWorker(job)
    worker.submit("bad")
    assert worker.wait(WAIT_S)
    worker.submit("good")
    assert worker.wait(WAIT_S)
    assert done == ["good"]
    assert "escaped" in caplog.text


def test_wait_gives_up_after_its_time():
    release = threading.Event()
    worker = LatestWorker(lambda setting, run: release.wait(WAIT_S))
    worker.submit(1)
    assert not worker.wait(0.02)
    release.set()
    assert worker.wait(WAIT_S)
