"""Run as ``python -m launcher``."""

import signal

if __name__ == "__main__":
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not ignored, as it is in the background of a shell
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports ends quietly
    from launcher.cli.main import main

    signal.signal(signal.SIGINT, handler)
    main()
