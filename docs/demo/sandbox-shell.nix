# The shell that builds: Debian's static busybox where it is installed, else the /bin/sh that Nix's sandbox has.
#
# The file must be called busybox, in a directory: the builder's own name says which of its programs it is.
if builtins.pathExists /usr/share/doc/busybox-static then
  {
    builder =
      builtins.path {
        name = "busybox";
        path = /usr/bin;
        filter = path: type: path == "/usr/bin/busybox";
      }
      + "/busybox";
    args = [ "sh" ];
  }
else
  {
    builder = "/bin/sh";
    args = [ ];
  }
