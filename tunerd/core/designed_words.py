"""The words of designed models, by kind of text; the first word of each kind is its name."""

from __future__ import annotations

REGION_WORDS: dict[str, str] = {
    "code": """
        code def return import class function loop array string integer boolean module
        package compile debug stack heap queue pointer buffer cache thread mutex lock socket
        server client request response header payload parse token lexer syntax compiler
        linker binary byte bit shift mask flag enum struct union method object instance
        inherit override interface abstract static public private protected virtual template
        generic lambda closure callback async await promise future yield iterator generator
        decorator exception throw catch finally assert test mock commit branch merge rebase
        push pull clone repository script shell terminal command argument option config
        deploy build release version patch bug fix refactor lint format comment variable
        constant scope global local recursion sort search hash tree graph node edge vertex
        matrix vector index offset slice append insert delete update select
    """,
    "math": """
        math plus minus times divided equals sum product quotient remainder fraction decimal
        percent ratio number zero one two three four five six seven eight nine ten hundred
        thousand million half third quarter double triple square cube root power exponent
        logarithm integral derivative limit series sequence theorem lemma proof axiom
        equation inequality polynomial coefficient factor prime divisor multiple even odd
        positive negative absolute value angle degree radian sine cosine tangent circle
        radius diameter circumference triangle rectangle polygon area volume perimeter
        length width height distance speed rate hour minute second meter kilometer gram
        litre average median mean variance deviation probability permutation combination set
        subset intersection complement domain range mapping inverse determinant eigenvalue
        plane axis slope intercept origin point line curve parabola ellipse hyperbola
        therefore hence solve calculate estimate digit numerator
    """,
    "translation": """
        translation bonjour monde merci maison jardin chien oiseau renard rapide brun saute
        paresseux soleil lune etoile mer montagne riviere foret arbre fleur pain fromage vin
        eau lait cafe livre ecole ville rue fenetre porte table chaise lit cuisine homme
        femme enfant ami famille coeur main tete oeil bouche grand petit vieux jeune beau
        nouveau rouge bleu vert noir blanc jaune manger boire dormir courir marcher parler
        lire ecrire chanter aimer vouloir pouvoir devoir savoir voir venir aller faire dire
        prendre donner demain hier matin soir nuit jour semaine mois annee toujours jamais
        souvent ici partout avec sans pour contre dans sous sur entre hola adios gracias
        casa perro gato libro agua fuego tierra cielo amigo hermano camino tiempo hallo
        danke wasser brot haus hund katze baum printemps automne
    """,
    "factual": """
        factual gravity force electron proton neutron atom molecule nucleus photon energy
        mass velocity acceleration momentum pressure temperature oxygen hydrogen carbon
        nitrogen helium iron copper silver gold planet mercury venus earth mars jupiter
        saturn uranus neptune comet asteroid galaxy universe continent europe asia africa
        america australia antarctica ocean atlantic pacific arctic desert volcano earthquake
        glacier climate species mammal reptile amphibian insect bacteria virus cell protein
        enzyme gene chromosome evolution fossil dinosaur photosynthesis respiration
        digestion skeleton muscle nerve brain lung liver kidney blood artery vein hormone
        vitamin mineral crystal granite marble limestone magnet circuit voltage current
        resistance transistor laser telescope microscope satellite rocket orbit eclipse
        equator latitude longitude hemisphere monsoon tundra savanna peninsula island
        archipelago capital population republic parliament constitution treaty empire
        dynasty pharaoh senator emperor census currency nebula plasma
    """,
    "summary": """
        summary overall briefly mainly chiefly largely mostly industrial revolution factory
        steam engine coal textile mill railway canal worker wage labour reform urban rural
        migration growth trade market capitalism invention patent manufacture machine
        spindle weaver loom cotton wool report chapter section author argues claims evidence
        conclusion finding result outcome cause effect impact consequence trend decline rise
        change transition period century decade era event development progress policy
        government economy society culture religion education health poverty wealth
        structure institution law court justice rights citizen vote election party leader
        minister crisis war peace alliance border territory colony independence movement
        protest strike campaign debate issue problem solution proposal decision agreement
        contract deal budget tax revenue debt credit bank investment profit loss price cost
        supply demand export tariff resource production consumption efficiency technology
        innovation
    """,
    "explain": """
        explain because however although whereas instead rather meanwhile otherwise moreover
        furthermore consider suppose imagine example namely thus so when while until unless
        since after before during through step process stage phase part whole system
        component layer model draft target predict guess verify accept reject parallel
        serial pass forward backward speedup latency throughput bandwidth memory compute
        idea concept principle reason purpose goal approach technique strategy advantage
        drawback benefit risk tradeoff balance condition assumption constraint requirement
        property feature behaviour pattern relation comparison difference similarity analogy
        contrast context detail aspect element input output signal noise error correction
        feedback control measure observe describe illustrate clarify demonstrate define
        introduce simplify generalise expand reduce combine separate compare evaluate choose
        depend require allow enable prevent ensure provide contain include exclude produce
        obtain remain become ultimately
    """,
    "chat": """
        chat hello hi hey thanks welcome sure okay yes no maybe please sorry great good nice
        fine cool wow really actually basically probably definitely absolutely exactly right
        wrong true false think know feel like love hate want need hope wish say tell ask
        answer talk listen hear see look watch read write learn teach help try start stop
        wait keep go come leave stay move sit stand walk run eat drink sleep wake work play
        cook clean buy sell pay spend save give take bring send get make do be have can will
        would should could might must today tomorrow yesterday morning evening weekend
        holiday birthday dinner lunch breakfast coffee tea pizza movie music song game book
        phone email message photo friend family brother sister mother father neighbour
    """,
    "creative": """
        creative moon lighthouse whisper shadow velvet ember drift hollow mist tide lantern
        raven willow echo sorrow wonder dream forgotten ancient golden crimson azure ivory
        twilight dawn dusk midnight storm thunder lightning breeze gale wave foam shore
        cliff harbour sail anchor mast captain sailor voyage compass horizon beacon flame
        candle smoke ash spark frost snow ice petal thorn rose lily ivy moss fern oak pine
        meadow valley brook stream pond lake fog cloud sky feather wing sparrow owl wolf fox
        deer horse dragon unicorn phoenix castle tower bridge gate garden maze mirror ribbon
        silk lace pearl diamond crown throne king queen knight wizard witch spell potion
        curse blessing prophecy legend myth fable ballad sonnet verse rhyme melody harp
        flute violin drum dance waltz heart soul spirit ghost angel demon
    """,
}
