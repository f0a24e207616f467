# Walks a set of attributes and tells what it finds by traces, one line of JSON each, while it finds it: a line `at` before
# anything of an attribute is looked at, so that whoever listens knows which one it was that could not be evaluated.
#
# root: what the source is; settings: see expression.rs.
{ root, settings }:
let
  inherit (builtins)
    all attrNames attrValues concatStringsSep elemAt foldl' fromJSON functionArgs genList hasAttr head isAttrs isFunction isString
    length replaceStrings seq tail toJSON toString trace tryEval typeOf;

  # JSON of names as they are: at one that is no UTF-8, Nix's own ends the process.
  text = string: "\"" + replaceStrings special escaped string + "\"";
  special = [ "\\" "\"" ] ++ map (code: fromJSON "\"${code}\"") controls;
  escaped = [ "\\\\" "\\\"" ] ++ controls;
  controls = genList (n: "\\u00" + (if n < 15 then "0" else "1") + elemAt digits (n + 1 - (n + 1) / 16 * 16)) 31;
  digits = [ "0" "1" "2" "3" "4" "5" "6" "7" "8" "9" "a" "b" "c" "d" "e" "f" ];
  list = shown: items: "[${concatStringsSep "," (map shown items)}]";
  object = fields: "{${concatStringsSep "," (map (name: "${text name}:${fields.${name}}") (attrNames fields))}}";

  say = kind: event: trace (settings.mark + object { ${kind} = event; }) null;
  # Where a pass is: in which root, and at which of the attributes there, level by level.
  at = root: index: path: say "at" (object { root = toString root; index = list toString index; path = list text path; });
  threw = path: say "threw" (list text path);

  # A file that is a function is called without arguments, an attribute only if it names arguments and needs none.
  top = if isFunction root then root { } else root;
  called = value:
    if settings.calls && isFunction value && functionArgs value != { } && all (optional: optional) (attrValues (functionArgs value))
    then value { }
    else value;

  look = named: path: uncalled:
    let value = called uncalled;
    in
    if !isAttrs value then { type = typeOf value; }
    else if value.type or null == "derivation" then { drv = value.drvPath; }
    else if named || length path < settings.levels || value.recurseForDerivations or false == true
    then { names = attrNames value; set = value; }
    else { type = "set"; };

  # What `throw` and `assert` say is lost here: who wants to hear it asks again, without catching.
  tried = value: if settings.catch then tryEval value else { success = true; inherit value; };
  looked = found: seq (found.drv or null) (seq (found.names or null) found);

  visit = root: named: after: index: path: value:
    seq (at root index path) (
      let
        seen = tried (looked (look named path value));
        found = seen.value;
        event = fields: object ({ path = list text path; } // fields);
      in
      if !seen.success then threw path
      else if found ? drv then say "found" (event { drv = if isString found.drv then text found.drv else toJSON found.drv; })
      else if found ? names then
        seq (say "within" (event { count = toString (length found.names); }))
          (walk root after index path found.set (part named path found.names))
      else if named then say "other" (event { type = text found.type; })
      else null
    );

  # Of several processes each takes every so many-th name of a set, at the level where derivations are: in a flake, below the systems.
  part = named: path: names:
    if settings.parts == 1 || length path + 1 < settings.levels || length path + 1 > settings.levels && !named then names
    else map (n: elemAt names (settings.part + n * settings.parts)) (genList (n: n) (share (length names)));
  share = count: if settings.part < count then (count - 1 - settings.part) / settings.parts + 1 else 0;

  # `after`: how far an earlier pass came, as it was told where it is.
  walk = root: after: index: path: set: names:
    let
      first = if after == [ ] then 0 else if tail after == [ ] then head after + 1 else head after;
      one = n:
        let name = elemAt names n;
        in visit root false (if after != [ ] && n == head after then tail after else [ ]) (index ++ [ n ]) (path ++ [ name ]) set.${name};
    in
    foldl' (_: n: one (first + n)) null (genList (n: n) (if first < length names then length names - first else 0));

  # To an attribute that has a name.
  reach = number: root: done: todo: value:
    if todo == [ ] then visit number root.asked root.after [ ] root.path value
    else
      let seen = tried (let set = called value; in seq (isAttrs set && hasAttr (head todo) set) set);
      in
      if !seen.success then threw root.path
      else if isAttrs seen.value && hasAttr (head todo) seen.value
      then reach number root (done ++ [ (head todo) ]) (tail todo) seen.value.${head todo}
      else say "missing" (object {
        path = list text root.path;
        within = list text done;
        names = list text (some (if isAttrs seen.value then attrNames seen.value else [ ]));
      });

  some = names: genList (elemAt names) (if length names < 1000 then length names else 1000);
  begin = number:
    let root = elemAt settings.roots number;
    in seq (at number [ ] root.path) (reach number root [ ] root.path top);
in
foldl' (_: number: begin number) null (genList (n: n) (length settings.roots))
