import os, signal, subprocess, time
class P:
    url = "redis://pillarbox:pillarbox@127.0.0.1:26398/0"
    def start(self):
        os.makedirs("/tmp/r2", exist_ok=True)
        self.p = subprocess.Popen(["redis-server","--port","26398","--dir","/tmp/r2","--appendonly","yes","--appendfsync","always"], stdout=subprocess.DEVNULL)
        while b"PONG" not in subprocess.run(["redis-cli","-p","26398","ping"],capture_output=True).stdout: time.sleep(0.02)
        subprocess.run(["redis-cli","-p","26398","ACL","SETUSER","pillarbox","on",">pillarbox","~*","&*","+@all"],capture_output=True)
    def kill(self):
        self.p.kill(); self.p.wait()
_p=None
def private_server(name):
    global _p
    if _p is None: _p=P()
    if not hasattr(_p,"p") or _p.p.poll() is not None: _p.start()
    return _p
