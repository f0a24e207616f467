# What there is to build: about forty derivations that need nothing but a shell.
let
  shell = import ./sandbox-shell.nix;

  # A derivation whose script makes $out, with the shell's own words only: there may be no other program.
  make =
    name: script: attributes:
    derivation (
      {
        inherit name;
        inherit (shell) builder;
        system = builtins.currentSystem;
        args = shell.args ++ [
          "-euc"
          script
        ];
      }
      // attributes
    );

  copy = file: "while read -r line; do echo \"$line\"; done <${file}";
  numbers = count: builtins.genList (index: index + 1) count;
  total = builtins.foldl' (sum: number: sum + number) 0;

  # Two ways from the bottom to the top.
  bottom = make "bottom" "echo bottom >$out" { };
  left = make "left" "{ ${copy bottom}; echo left; } >$out" { };
  right = make "right" "{ ${copy bottom}; echo right; } >$out" { };
  top = make "top" "{ ${copy left}; ${copy right}; } >$out" { };

  # Sixteen, each of which waits for the one before it.
  link = before: number: make "link-${toString number}" "{ ${copy before}; echo ${toString number}; } >$out" { };
  chain = builtins.foldl' link bottom (numbers 16);

  # Twelve that can be built at once, and one that adds them up.
  leaf = number: make "leaf-${toString number}" "echo ${toString (number * number)} >$out" { };
  sum =
    let
      add = file: "read -r number <${file}; sum=$((sum + number))";
      script = "sum=0; ${builtins.concatStringsSep "; " (map (number: add (leaf number)) (numbers 12))}; echo $sum >$out";
    in
    make "sum" script { };
  checked = make "checked" "read -r sum <${sum}; [ $sum = ${
    toString (total (map (number: number * number) (numbers 12)))
  } ]; echo correct >$out" { };

  # Five seconds, and a line for each in its log.
  slow = make "slow" ''
    seconds() { read -r up idle </proc/uptime; echo "''${up%.*}"; }
    begun=$(seconds) said=0
    while [ $said -lt 5 ]; do
      if [ $(($(seconds) - begun)) -gt $said ]; then
        said=$((said + 1))
        echo "second $said of 5"
      fi
    done
    echo $said >$out
  '' { };

  # Two outputs, one of which nobody needs to fetch for the other.
  split = make "split" "echo program >$out; echo \"how to use $out\" >$doc" {
    outputs = [
      "out"
      "doc"
    ];
  };
  reader = make "reader" "{ ${copy split.doc}; } >$out" { };

  # Known beforehand, however it is made.
  fixed = make "fixed" "echo 'always the same' >$out" {
    outputHashMode = "flat";
    outputHashAlgo = "sha256";
    outputHash = "e01d54e20d5a6dc24c3acb19784e0b2b3b2dda54c677d0eb2c3384f38d8802a4";
  };

  everything = make "everything" "{ ${
    builtins.concatStringsSep "; " (
      map copy [
        top
        chain
        checked
        slow
        reader
        fixed
      ]
    )
  }; } >$out" { };
in
{
  inherit
    chain
    checked
    everything
    fixed
    reader
    slow
    split
    top
    ;

  # Not built unless it is asked for: harmonia-ci eval docs/demo --attr broken
  broken = rec {
    culprit = make "culprit" "echo 'this build fails, as it should' >&2; exit 3" { };
    victim = make "victim" "{ ${copy culprit}; } >$out" { };
    bystander = make "bystander" "{ ${copy victim}; ${copy top}; } >$out" { };
  };
}
