# The derivations are made of this file by Nix 2.8 and 2.34:
# nix-instantiate graph.nix --argstr version 2.8 --option experimental-features 'ca-derivations impure-derivations'
# and dynamic-derivations and blake3-hashes for 2.34.
{ version }:
let
  make = attributes: derivation ({ system = "x86_64-linux"; builder = "/bin/sh"; args = [ "-c" "a \"b\"\t\\\n\r$" ]; } // attributes);
  fixed = mode: algorithm: url: make {
    name = "fixed-${mode}-${algorithm}";
    inherit url;
    outputHash = builtins.hashString algorithm "contents";
    outputHashAlgo = algorithm;
    outputHashMode = mode;
  };
  source = fixed "recursive" "sha256";
  middle = url: make { name = "middle"; outputs = [ "out" "dev" "lib" ]; src = source url; };
  a = middle "https://a.example/";
  b = middle "https://b.example/";
  c = middle "https://c.example/";
  structured = make {
    name = "structured";
    __structuredAttrs = true;
    outputs = [ "out" "dev" ];
    input = a;
    large = 1000000.0;
    small = 0.1;
    text = "é\t\n\"/\\";
    nested = { z = 1; a = [ null { b = true; } ]; };
  };
  floating = make { name = "floating"; outputs = [ "out" "dev" ]; __contentAddressed = true; outputHashMode = "recursive"; outputHashAlgo = "sha256"; };
  file = builtins.toFile "file" "hello\n";
in
{
  flat-md5 = fixed "flat" "md5" "x";
  flat-sha1 = fixed "flat" "sha1" "x";
  flat-sha256 = fixed "flat" "sha256" "x";
  recursive-sha256 = source "x";
  recursive-sha512 = fixed "recursive" "sha512" "x";
  with-sources = make { name = "with-sources"; inherit file; odd-name = builtins.toFile "a+b?c=d._e" "see ${file}"; };
  two-urls-one-output = make { name = "two-urls-one-output"; inputs = [ a.out b.out ]; };
  two-urls-two-outputs = make { name = "two-urls-two-outputs"; inputs = [ a.out b.dev ]; };
  three-urls-three-outputs = make { name = "three-urls-three-outputs"; inputs = [ a.out b.dev c.lib ]; };
  two-fixed-urls = make { name = "two-fixed-urls"; inputs = [ (source "x") (source "y") ]; };
  above = make { name = "above"; input = make { name = "two-urls-two-outputs"; inputs = [ a.out b.dev ]; }; };
  inherit structured floating;
  above-structured = make { name = "above-structured"; input = structured.dev; };
  deferred = make { name = "deferred"; input = floating.dev; };
  above-deferred = make { name = "above-deferred"; input = make { name = "deferred"; input = floating.dev; }; };
  fixed-above-floating = make { name = "fixed"; input = floating; outputHash = builtins.hashString "sha256" "x"; outputHashAlgo = "sha256"; };
  impure = make { name = "impure"; __impure = true; outputHashMode = "recursive"; outputHashAlgo = "sha256"; };
} // (if version == "2.8" then { } else {
  blake3 = make { name = "blake3"; outputHash = "0000000000000000000000000000000000000000000000000000000000000000"; outputHashAlgo = "blake3"; outputHashMode = "recursive"; };
  text = make { name = "text"; outputHash = builtins.hashString "sha256" "x"; outputHashAlgo = "sha256"; outputHashMode = "text"; };
  dynamic = make {
    name = "dynamic";
    input = builtins.outputOf (make { name = "producer.drv"; __contentAddressed = true; outputHashMode = "text"; outputHashAlgo = "sha256"; }).outPath "out";
  };
})
